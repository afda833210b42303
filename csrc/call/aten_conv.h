#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "call/conv_geometry.h"
#include "core/problem/activation.h"

namespace cudnn_autotune {

// Whether a transform of torch.func is under way on this thread. Transforms, and forward-mode
// derivatives, have rules for ATen's convolution only. (It cannot be read from
// functorchTLSAccessor(), which stays set on a thread once a transform was used there. The dispatch
// key that is read here is included only as long as one is under way.)
bool in_transform();

// The operators computed by ATen alone, on any device: where cuDNN has no engine, and on a CPU.
// Padding that differs before and after is applied as PyTorch's
// padding="same" does it: the input is padded first. Throws c10::ValueError for lists of a wrong
// length, and what ATen throws.
//
// They call PyTorch's own convolution, also where csrc/conv/aten_kernels.h has put another in its
// place.
at::Tensor aten_transpose(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef output_padding,
                          at::IntArrayRef dilation, int64_t groups);
at::Tensor aten_dgrad(const at::Tensor& grad_output, const at::Tensor& weight,
                      const ConvGeometry& geometry);
at::Tensor aten_wgrad(const at::Tensor& grad_output, const at::Tensor& input,
                      const ConvGeometry& geometry);

// The activation that an operator's argument names. Throws c10::ValueError for an unknown one.
Activation activation_of_call(std::string_view name);

// activation(x * w + bias + residual), each step by an operator of ATen's.
at::Tensor aten_fused(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& residual, const ConvGeometry& geometry,
                      const Activation& activation, const std::optional<at::Tensor>& slope);
// The last two steps alone, on the convolution's result with its bias, whose channels are dimension
// 1. Throws c10::ValueError if the residual or the slope has another shape or dtype, or if there is
// a slope without prelu or prelu without one.
at::Tensor aten_epilogue(const at::Tensor& result, const std::optional<at::Tensor>& residual,
                         const Activation& activation, const std::optional<at::Tensor>& slope);

// Copies a result into a tensor. Throws c10::ValueError if that has another shape or dtype.
void copy_result(const at::Tensor& output, const at::Tensor& result);

// Adds the bias, of shape (K), to `y`, of shape (N, K, spatial...).
void add_bias(const at::Tensor& y, const at::Tensor& bias);

// As long as one lives, ATen's convolutions and norms on this thread are PyTorch's own.
class OwnPathGuard {
 public:
  OwnPathGuard() noexcept;
  ~OwnPathGuard();
  OwnPathGuard(const OwnPathGuard&) = delete;
  OwnPathGuard& operator=(const OwnPathGuard&) = delete;

  // Whether one lives on this thread.
  static bool is_active();
};

}  // namespace cudnn_autotune
