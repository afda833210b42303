#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace cudnn_autotune {

// The arguments of one convolution as the kernels get them. All shapes are the forward's, also for
// dgrad and wgrad. It refers to the caller's lists.
struct ConvGeometry {
  at::IntArrayRef input_size;   // (N, C, spatial...)
  at::IntArrayRef weight_size;  // (K, C / groups, kernel...)
  at::IntArrayRef stride;
  at::IntArrayRef padding;  // one entry a dimension, or twice as many: all before, then all after
  at::IntArrayRef dilation;
  int64_t groups;

  size_t spatial_dims() const { return stride.size(); }
  int64_t pre_padding(size_t d) const { return padding[d]; }
  int64_t post_padding(size_t d) const {
    return padding[padding.size() == spatial_dims() ? d : d + spatial_dims()];
  }

  // Where the kernel has one element, the dilation has no effect; 1 makes equal problems equal.
  int64_t dilation_of(size_t d) const { return weight_size[2 + d] == 1 ? 1 : dilation[d]; }

  // cuDNN computes sizes in 32 bits.
  static constexpr int64_t kMostCounted = std::numeric_limits<int32_t>::max();

  bool fits_int32() const {
    const auto fit = [](at::IntArrayRef values) {
      return std::all_of(values.begin(), values.end(), [](int64_t v) { return v <= kMostCounted; });
    };
    return groups <= kMostCounted && fit(stride) && fit(padding) && fit(dilation);
  }

  // Whether the sums and products that cuDNN computes fit too: cuDNN 9.19 divides by zero where
  // they overflow. The geometry must be valid, and its tensors not empty.
  bool products_fit_int32() const {
    const auto product_fits = [](const auto& sizes) {
      int64_t product = 1;
      return std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) {
        return size <= kMostCounted && (product *= size) <= kMostCounted;
      });
    };
    for (size_t d = 0; d < spatial_dims(); ++d) {
      if (input_size[2 + d] + pre_padding(d) + post_padding(d) > kMostCounted ||
          dilation_of(d) * stride[d] > kMostCounted) {
        return false;
      }
    }
    return product_fits(input_size) && product_fits(weight_size) && product_fits(output_size());
  }

  // Whether these arguments make a convolution. For those that do not, ATen raises the error.
  bool is_valid() const {
    const size_t n = spatial_dims();
    if (n < 1 || n > 3 || input_size.size() != n + 2 || weight_size.size() != n + 2 ||
        dilation.size() != n || (padding.size() != n && padding.size() != 2 * n) || groups < 1 ||
        input_size[1] != weight_size[1] * groups || weight_size[0] % groups != 0) {
      return false;
    }
    for (size_t d = 0; d < n; ++d) {
      if (stride[d] < 1 || dilation[d] < 1 || pre_padding(d) < 0 || post_padding(d) < 0 ||
          weight_size[2 + d] < 1 || output_extent(d) < 1) {
        return false;
      }
    }
    return true;
  }

  // The size of the output in one spatial dimension; below 1 if the kernel does not fit into the
  // padded input. The stride must be 1 or more.
  int64_t output_extent(size_t d) const {
    const int64_t room = input_size[2 + d] + pre_padding(d) + post_padding(d) -
                         dilation[d] * (weight_size[2 + d] - 1) - 1;
    return room < 0 ? 0 : room / stride[d] + 1;
  }

  std::vector<int64_t> output_size() const {
    std::vector<int64_t> size{input_size[0], weight_size[0]};
    for (size_t d = 0; d < spatial_dims(); ++d) size.push_back(output_extent(d));
    return size;
  }
};

}  // namespace cudnn_autotune
