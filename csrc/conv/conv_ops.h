#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace cudnn_autotune {

// The C++ signatures of the operators, which stand below autograd. Those of a layer's call and of
// its derivatives are called by the kernels of aten::convolution (aten_kernels.h), the others by
// the programs of torch.compile.
//   stride, dilation: one entry for each spatial dimension
//   padding: one entry for each spatial dimension, or twice as many: all before, then all after
//   sampling: the name of a mode; "" takes the setting
//   workspace_limit: bytes; -1 takes the setting
using FpropSignature = at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                                  c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                                  c10::SymInt groups, std::string_view sampling,
                                  int64_t workspace_limit);
using DgradSignature = at::Tensor(const at::Tensor& grad_output, const at::Tensor& weight,
                                  c10::SymIntArrayRef input_size, c10::SymIntArrayRef stride,
                                  c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                                  c10::SymInt groups, std::string_view sampling,
                                  int64_t workspace_limit);
using WgradSignature = at::Tensor(const at::Tensor& grad_output, const at::Tensor& input,
                                  c10::SymIntArrayRef weight_size, c10::SymIntArrayRef stride,
                                  c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                                  c10::SymInt groups, std::string_view sampling,
                                  int64_t workspace_limit);

// The operators in torch's dispatcher.
const c10::TypedOperatorHandle<FpropSignature>& conv_fprop_op();
const c10::TypedOperatorHandle<DgradSignature>& conv_dgrad_op();
const c10::TypedOperatorHandle<WgradSignature>& conv_wgrad_op();

}  // namespace cudnn_autotune
