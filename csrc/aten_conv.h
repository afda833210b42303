#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_autotune {

// The three operators computed by ATen alone, on any device. They are the CPU kernels, they run
// where cuDNN has no engine, and functorch and forward-mode derivatives use them. The arguments are
// those of conv_ops.h. Padding that differs before and after is applied as PyTorch's padding="same"
// does it: the input is padded first. Throws c10::ValueError for lists of a wrong length, and what
// ATen throws.
at::Tensor aten_fprop(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                      c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                      const c10::SymInt& groups);
at::Tensor aten_dgrad(const at::Tensor& grad_output, const at::Tensor& weight,
                      c10::SymIntArrayRef input_size, c10::SymIntArrayRef stride,
                      c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                      const c10::SymInt& groups);
at::Tensor aten_wgrad(const at::Tensor& grad_output, const at::Tensor& input,
                      c10::SymIntArrayRef weight_size, c10::SymIntArrayRef stride,
                      c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                      const c10::SymInt& groups);

}  // namespace cudnn_autotune
