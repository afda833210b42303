#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <torch/library.h>

#include <vector>

#include "call/aten_conv.h"
#include "call/conv_layout.h"
#include "call/settings.h"
#include "conv/conv_ops.h"
#include "conv/detail/conv_geometry.h"

namespace cudnn_autotune {
namespace {

// The CPU kernels call ATen. They check the mode and the limit, and give results in the layout that
// those for CUDA give, so that what calls the operators can be tested on a machine without a GPU.
// Nothing that serves a user calls them.

at::MemoryFormat output_format(const at::Tensor& input, const at::Tensor& weight, bool pads) {
  return is_image_of_height_1(input, weight, pads) ? at::MemoryFormat::ChannelsLast
                                                   : conv_memory_format(input, weight);
}

at::Tensor conv_fprop_cpu(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          c10::SymInt groups, std::string_view sampling, int64_t workspace_limit) {
  resolve(sampling, workspace_limit);
  const auto y = aten_fprop(input, weight, bias, stride, padding, dilation, groups);
  return with_strides_of(output_format(input, weight, padding.size() > stride.size()), y);
}

at::Tensor conv_transpose_cpu(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                              c10::SymIntArrayRef padding, c10::SymIntArrayRef output_padding,
                              c10::SymIntArrayRef dilation, c10::SymInt groups,
                              std::string_view sampling, int64_t workspace_limit) {
  resolve(sampling, workspace_limit);
  const auto y =
      aten_transpose(input, weight, bias, stride, padding, output_padding, dilation, groups);
  return with_strides_of(output_format(input, weight, /*pads=*/false), y);
}

at::Tensor conv_dgrad_cpu(const at::Tensor& grad_output, const at::Tensor& weight,
                          at::IntArrayRef input_size, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                          std::string_view sampling, int64_t workspace_limit) {
  resolve(sampling, workspace_limit);
  check_gradient("conv_dgrad", grad_output,
                 {input_size, weight.sizes(), stride, padding, dilation, groups});
  return with_strides_of(
      is_dgrad_of_height_1(grad_output, weight) ? at::MemoryFormat::ChannelsLast
                                                : conv_memory_format(grad_output, weight),
      aten_dgrad(grad_output, weight, c10::fromIntArrayRefSlow(input_size),
                 c10::fromIntArrayRefSlow(stride), c10::fromIntArrayRefSlow(padding),
                 c10::fromIntArrayRefSlow(dilation), groups));
}

at::Tensor conv_wgrad_cpu(const at::Tensor& grad_output, const at::Tensor& input,
                          at::IntArrayRef weight_size, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                          std::string_view sampling, int64_t workspace_limit) {
  resolve(sampling, workspace_limit);
  check_gradient("conv_wgrad", grad_output,
                 {input.sizes(), weight_size, stride, padding, dilation, groups});
  return with_strides_of(
      is_wgrad_of_height_1(grad_output, input) ? at::MemoryFormat::ChannelsLast
                                               : conv_memory_format(grad_output, input),
      aten_wgrad(grad_output, input, c10::fromIntArrayRefSlow(weight_size),
                 c10::fromIntArrayRefSlow(stride), c10::fromIntArrayRefSlow(padding),
                 c10::fromIntArrayRefSlow(dilation), groups));
}

at::Tensor conv_fused_cpu(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias,
                          const std::optional<at::Tensor>& residual, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          c10::SymInt groups, std::string_view activation,
                          std::string_view sampling, int64_t workspace_limit,
                          const std::optional<at::Tensor>& slope) {
  resolve(sampling, workspace_limit);
  const auto y = aten_fused(input, weight, bias, residual, stride, padding, dilation, groups,
                            activation_of_call(activation), slope);
  return with_strides_of(output_format(input, weight, padding.size() > stride.size()), y);
}

void conv_fused_into_cpu(const at::Tensor& output, const at::Tensor& input,
                         const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         const std::optional<at::Tensor>& residual, c10::SymIntArrayRef stride,
                         c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                         c10::SymInt groups, std::string_view activation, std::string_view sampling,
                         int64_t workspace_limit, const std::optional<at::Tensor>& slope) {
  copy_result(output,
              conv_fused_cpu(input, weight, bias, residual, stride, padding, dilation,
                             std::move(groups), activation, sampling, workspace_limit, slope));
}

at::Tensor conv_each_image_cpu(const at::Tensor& input, const at::Tensor& weight,
                               at::IntArrayRef stride, at::IntArrayRef padding,
                               at::IntArrayRef dilation, std::string_view sampling,
                               int64_t workspace_limit) {
  resolve(sampling, workspace_limit);
  const int64_t kernels = kernels_of_an_image(input, weight, stride, padding, dilation);
  std::vector<at::Tensor> outputs;
  for (int64_t n = 0; n < input.size(0); ++n) {
    outputs.push_back(at::convolution(input.narrow(0, n, 1), weight.narrow(0, n * kernels, kernels),
                                      std::nullopt, stride, padding, dilation, /*transposed=*/false,
                                      std::vector<int64_t>(stride.size(), 0), /*groups=*/1));
  }
  return with_strides_of(conv_memory_format(input, weight), at::cat(outputs));
}

}  // namespace
}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, CPU, m) {
  m.impl("conv_fprop", cudnn_autotune::conv_fprop_cpu);
  m.impl("conv_transpose", cudnn_autotune::conv_transpose_cpu);
  m.impl("conv_dgrad", cudnn_autotune::conv_dgrad_cpu);
  m.impl("conv_wgrad", cudnn_autotune::conv_wgrad_cpu);
  m.impl("conv_fused", cudnn_autotune::conv_fused_cpu);
  m.impl("conv_fused_into_", cudnn_autotune::conv_fused_into_cpu);
  m.impl("conv_each_image", cudnn_autotune::conv_each_image_cpu);
}
