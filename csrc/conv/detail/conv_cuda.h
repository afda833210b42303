#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace cudnn_autotune {

// Kernels of the operators that stand for a layer's call and its derivatives. The schemas are in
// conv_schema.cpp.
//   stride, dilation: one entry for each spatial dimension
//   padding: one entry for each spatial dimension, or twice as many: all before, then all after
//   sampling: the name of a mode; "" takes the setting
//   workspace_limit: bytes; -1 takes the setting
at::Tensor conv_fprop(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, int64_t groups,
                      std::string_view sampling, int64_t workspace_limit);
at::Tensor conv_dgrad(const at::Tensor& grad_output, const at::Tensor& weight,
                      at::IntArrayRef input_size, at::IntArrayRef stride, at::IntArrayRef padding,
                      at::IntArrayRef dilation, int64_t groups, std::string_view sampling,
                      int64_t workspace_limit);
at::Tensor conv_wgrad(const at::Tensor& grad_output, const at::Tensor& input,
                      at::IntArrayRef weight_size, at::IntArrayRef stride, at::IntArrayRef padding,
                      at::IntArrayRef dilation, int64_t groups, std::string_view sampling,
                      int64_t workspace_limit);

}  // namespace cudnn_autotune
