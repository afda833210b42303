#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "call/conv_geometry.h"
#include "call/torch_bridge.h"

// What the kernels for CUDA ask of a call before they look an engine up.

namespace cudnn_autotune {

// Reasons why a call is left to PyTorch, as fallbacks() counts them.
constexpr const char* kNotTaken = "arguments that PyTorch refuses, or takes in a way of its own";
constexpr const char* kNotCounted = "a stride, padding, dilation or group count of 2**31 or more";

// Why a call is left to ATen before any engine is looked up; null if it is not.
inline const char* why_not_cudnn(const at::Tensor& a, const at::Tensor& b,
                                 const ConvGeometry& geometry) {
  if (!at::globalContext().userEnabledCuDNN()) return "torch.backends.cudnn.enabled is False";
  if (!data_type(a.scalar_type())) return "a dtype that cuDNN has no convolution for";
  // This comes first, because with such values the size of the output would overflow.
  if (!geometry.fits_int32()) return kNotCounted;
  if (a.scalar_type() != b.scalar_type() || a.device() != b.device() || !geometry.is_valid()) {
    return kNotTaken;
  }
  const auto is_empty = [](at::IntArrayRef size) {
    return std::find(size.begin(), size.end(), 0) != size.end();
  };
  if (is_empty(geometry.input_size) || is_empty(geometry.weight_size)) {
    return "a tensor without elements";
  }
  if (!geometry.products_fit_int32()) {
    return "2**31 or more of a tensor's elements, of a padded dimension, or of stride times "
           "dilation";
  }
  return nullptr;
}

inline bool bias_fits(const at::Tensor& bias, const at::Tensor& input, int64_t channels) {
  return bias.dim() == 1 && bias.size(0) == channels && bias.scalar_type() == input.scalar_type() &&
         bias.device() == input.device();
}

// The size of the output of a transposed convolution; nothing if the arguments make none, or one
// that is not the gradient of a convolution (an output padding of a stride or more).
inline std::optional<std::vector<int64_t>> transposed_output_size(
    const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef output_padding, at::IntArrayRef dilation,
    int64_t groups) {
  const auto n = static_cast<int64_t>(stride.size());
  const auto has = [n](at::IntArrayRef values) {
    return static_cast<int64_t>(values.size()) == n &&
           std::all_of(values.begin(), values.end(), [](int64_t value) {
             return 0 <= value && value <= ConvGeometry::kMostCounted;
           });
  };
  if (!has(stride) || !has(padding) || !has(output_padding) || !has(dilation) || groups < 1 ||
      input.dim() != n + 2 || weight.dim() != n + 2 || input.size(1) != weight.size(0)) {
    return std::nullopt;
  }
  std::vector<int64_t> size{input.size(0), weight.size(1) * groups};
  for (int64_t d = 0; d < n; ++d) {
    if (output_padding[d] >= stride[d]) return std::nullopt;
    size.push_back((input.size(2 + d) - 1) * stride[d] - 2 * padding[d] +
                   dilation[d] * (weight.size(2 + d) - 1) + output_padding[d] + 1);
  }
  const ConvGeometry geometry{size, weight.sizes(), stride, padding, dilation, groups};
  if (!geometry.is_valid() || input.sizes() != at::IntArrayRef(geometry.output_size())) {
    return std::nullopt;
  }
  return size;
}

}  // namespace cudnn_autotune
