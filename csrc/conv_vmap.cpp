#include <torch/library.h>

#include "aten_conv.h"
#include "conv_ops.h"

namespace cudnn_autotune {
namespace {

// Under torch.vmap each operator calls ATen's convolution, which has a batching rule.
at::Tensor conv_fprop_batched(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              c10::SymInt groups, std::string_view, int64_t) {
  return aten_fprop(input, weight, bias, stride, padding, dilation, groups);
}

at::Tensor conv_transpose_batched(const at::Tensor& input, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                                  c10::SymIntArrayRef padding, c10::SymIntArrayRef output_padding,
                                  c10::SymIntArrayRef dilation, c10::SymInt groups,
                                  std::string_view, int64_t) {
  return aten_transpose(input, weight, bias, stride, padding, output_padding, dilation, groups);
}

at::Tensor conv_dgrad_batched(const at::Tensor& grad_output, const at::Tensor& weight,
                              c10::SymIntArrayRef input_size, c10::SymIntArrayRef stride,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              c10::SymInt groups, std::string_view, int64_t) {
  return aten_dgrad(grad_output, weight, input_size, stride, padding, dilation, groups);
}

at::Tensor conv_wgrad_batched(const at::Tensor& grad_output, const at::Tensor& input,
                              c10::SymIntArrayRef weight_size, c10::SymIntArrayRef stride,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              c10::SymInt groups, std::string_view, int64_t) {
  return aten_wgrad(grad_output, input, weight_size, stride, padding, dilation, groups);
}

at::Tensor conv_fused_batched(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias,
                              const std::optional<at::Tensor>& residual, c10::SymIntArrayRef stride,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                              c10::SymInt groups, std::string_view activation, std::string_view,
                              int64_t) {
  return aten_fused(input, weight, bias, residual, stride, padding, dilation, groups,
                    activation_of_call(activation));
}

}  // namespace
}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, FuncTorchBatched, m) {
  m.impl("conv_fprop", cudnn_autotune::conv_fprop_batched);
  m.impl("conv_transpose", cudnn_autotune::conv_transpose_batched);
  m.impl("conv_dgrad", cudnn_autotune::conv_dgrad_batched);
  m.impl("conv_wgrad", cudnn_autotune::conv_wgrad_batched);
  m.impl("conv_fused", cudnn_autotune::conv_fused_batched);
}
