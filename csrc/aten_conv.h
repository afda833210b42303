#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_autotune {

// The same three operators by ATen alone, on any device: the CPU kernels, what runs where cuDNN
// has no engine, and what functorch and forward-mode derivatives see. Arguments as in conv_ops.h;
// padding that differs before and after is applied as PyTorch's padding="same" does it.
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
