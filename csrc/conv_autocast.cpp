#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <utility>

#include "conv_ops.h"

namespace cudnn_autotune {
namespace {

using at::autocast::cached_cast;

// Casts all operands to the device's autocast dtype, as autocast does for ATen's convolutions. Only
// forwards need this: a backward runs in the dtypes that its forward saved.
template <c10::DispatchKey autocast_key, c10::DeviceType device>
at::Tensor conv_fprop_autocast(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                               c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                               c10::SymInt groups, std::string_view sampling,
                               int64_t workspace_limit) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return conv_fprop_op().call(cached_cast(dtype, input, device), cached_cast(dtype, weight, device),
                              cached_cast(dtype, bias, device), stride, padding, dilation,
                              std::move(groups), sampling, workspace_limit);
}

template <c10::DispatchKey autocast_key, c10::DeviceType device>
at::Tensor conv_fused_autocast(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias,
                               const std::optional<at::Tensor>& residual,
                               c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                               c10::SymIntArrayRef dilation, c10::SymInt groups,
                               std::string_view activation, std::string_view sampling,
                               int64_t workspace_limit) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return conv_fused_op().call(cached_cast(dtype, input, device), cached_cast(dtype, weight, device),
                              cached_cast(dtype, bias, device),
                              cached_cast(dtype, residual, device), stride, padding, dilation,
                              std::move(groups), activation, sampling, workspace_limit);
}

template <c10::DispatchKey autocast_key, c10::DeviceType device>
at::Tensor conv_transpose_autocast(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias,
                                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                   c10::SymIntArrayRef output_padding, c10::SymIntArrayRef dilation,
                                   c10::SymInt groups, std::string_view sampling,
                                   int64_t workspace_limit) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(autocast_key);
  const auto dtype = at::autocast::get_autocast_dtype(device);
  return conv_transpose_op().call(cached_cast(dtype, input, device),
                                  cached_cast(dtype, weight, device),
                                  cached_cast(dtype, bias, device), stride, padding, output_padding,
                                  dilation, std::move(groups), sampling, workspace_limit);
}

}  // namespace
}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, AutocastCUDA, m) {
  m.impl(
      "conv_fprop",
      cudnn_autotune::conv_fprop_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
  m.impl(
      "conv_fused",
      cudnn_autotune::conv_fused_autocast<c10::DispatchKey::AutocastCUDA, c10::DeviceType::CUDA>);
  m.impl("conv_transpose", cudnn_autotune::conv_transpose_autocast<c10::DispatchKey::AutocastCUDA,
                                                                   c10::DeviceType::CUDA>);
}

TORCH_LIBRARY_IMPL(cudnn_autotune, AutocastCPU, m) {
  m.impl("conv_fprop",
         cudnn_autotune::conv_fprop_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
  m.impl("conv_fused",
         cudnn_autotune::conv_fused_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
  m.impl(
      "conv_transpose",
      cudnn_autotune::conv_transpose_autocast<c10::DispatchKey::AutocastCPU, c10::DeviceType::CPU>);
}
