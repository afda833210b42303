#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_autotune {

inline at::MemoryFormat channels_last_format(int64_t dims) {
  switch (dims) {
    case 4:
      return at::MemoryFormat::ChannelsLast;
    case 5:
      return at::MemoryFormat::ChannelsLast3d;
    default:
      return at::MemoryFormat::Contiguous;
  }
}

// The layout in which a convolution of `a` and `b` runs on CUDA. It is the one that PyTorch
// chooses: channels_last if either operand is, but never in float64.
inline at::MemoryFormat conv_memory_format(const at::Tensor& a, const at::Tensor& b) {
  const auto channels_last = channels_last_format(a.dim());
  if (a.scalar_type() == at::kDouble) return at::MemoryFormat::Contiguous;
  const bool any =
      a.suggest_memory_format() == channels_last || b.suggest_memory_format() == channels_last;
  return any ? channels_last : at::MemoryFormat::Contiguous;
}

}  // namespace cudnn_autotune
