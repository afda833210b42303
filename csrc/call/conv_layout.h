#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/DimVector.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <array>
#include <vector>

// The layouts that PyTorch gives to the results of a convolution on CUDA, read from the strides of
// its tensors as ATen's Convolution.cpp and cudnn/ConvShared.cpp read them. Where a size is 1,
// strides can be read in two ways, and ATen's functions do not all read them alike.

namespace cudnn_autotune {

// The strides of a new tensor, contiguous as (N, C, *spatial), or with `in_rows` as (N, *spatial,
// C). Those of one without elements are torch's too.
inline c10::DimVector dense_strides(at::IntArrayRef size, bool in_rows) {
  if (!in_rows) return c10::contiguous_strides(size);
  c10::DimVector strides(size.size(), 1);
  int64_t place = size[1];
  for (size_t d = size.size(); d-- > 0;) {
    if (d == 1) continue;
    strides[d] = place;
    place *= size[d];
  }
  return strides;
}

// Whether a tensor has these strides; that of a dimension of size 1 does not matter.
inline bool is_dense(const at::Tensor& tensor, bool in_rows) {
  const auto expected = dense_strides(tensor.sizes(), in_rows);
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != expected[d]) return false;
  }
  return true;
}

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

// The layout of a convolution one operand of which has layout `a`, the other one `b`.
inline at::MemoryFormat conv_memory_format(at::MemoryFormat a, at::MemoryFormat b,
                                           at::ScalarType dtype) {
  if (dtype == at::kDouble) return at::MemoryFormat::Contiguous;
  return a != at::MemoryFormat::Contiguous ? a : b;
}

// The layout in which a convolution of `a` and `b` runs on CUDA. It is the one that PyTorch
// chooses: channels_last if either operand is, but never in float64. See is_image_of_height_1().
inline at::MemoryFormat conv_memory_format(const at::Tensor& a, const at::Tensor& b) {
  const auto channels_last = channels_last_format(a.dim());
  if (a.scalar_type() == at::kDouble) return at::MemoryFormat::Contiguous;
  const bool any =
      a.suggest_memory_format() == channels_last || b.suggest_memory_format() == channels_last;
  return any ? channels_last : at::MemoryFormat::Contiguous;
}

// Elements from a pixel to the next one of images or volumes that are dense in channels_last, or
// are a slice of the channels of some that are; 0 of any other tensor.
inline int64_t pixel_stride(const at::Tensor& tensor) {
  const auto size = tensor.sizes();
  const auto stride = tensor.strides();
  const int64_t dims = tensor.dim();
  if (dims < 4 || dims > 5 || tensor.numel() == 0 || (size[1] > 1 && stride[1] != 1)) return 0;
  int64_t found = 0;   // known once a dimension has more than one element
  int64_t pixels = 1;  // from an element of the dimension to the next
  for (int64_t d = dims - 1; d >= 0; --d) {
    if (d == 1) continue;
    if (size[d] > 1) {
      if (found == 0) found = stride[d] / pixels;
      if (found < size[1] || stride[d] != found * pixels) return 0;
    }
    pixels *= size[d];
  }
  return found == 0 ? size[1] : found;
}

// Whether a tensor of a 1-d convolution looks like channels_last to PyTorch, which views it as
// images of height 1.
inline bool is_channels_last_image(const at::Tensor& tensor) {
  const auto size = tensor.sizes();
  const auto stride = tensor.strides();
  const std::array<int64_t, 4> image{size[0], size[1], 1, size[2]};
  const std::array<int64_t, 4> strides{stride[0], stride[1], size[2] * stride[2], stride[2]};
  return c10::is_channels_last_strides_2d(at::IntArrayRef(image), at::IntArrayRef(strides));
}

// Whether PyTorch computes a 1-d convolution as one of images of height 1 in channels_last. It
// makes the input contiguous before it takes the layout of input and weight (see as_images()).
//   pads: whether the input is padded before, which leaves it contiguous
inline bool is_image_of_height_1(const at::Tensor& input, const at::Tensor& weight, bool pads) {
  if (weight.dim() != 3 || input.dim() != 3 || input.scalar_type() == at::kDouble) return false;
  return is_channels_last_image(weight) ||
         (!pads && input.is_contiguous() && is_channels_last_image(input));
}

// Whether a tensor of a 1-d convolution lies as images of height 1 in channels_last and in no other
// way.
inline bool lies_as_channels_last_image(const at::Tensor& tensor) {
  return tensor.dim() == 3 && !tensor.is_contiguous() && is_channels_last_image(tensor);
}

// Whether a gradient of the input of a 1-d convolution is computed as one of images of height 1.
// Unlike PyTorch's, this operator does not know the layout of the input.
inline bool is_dgrad_of_height_1(const at::Tensor& grad_output, const at::Tensor& weight) {
  return weight.dim() == 3 && grad_output.dim() == 3 && grad_output.scalar_type() != at::kDouble &&
         is_channels_last_image(weight);
}

// The same of a gradient of the weight, which does not know the layout of the weight.
inline bool is_wgrad_of_height_1(const at::Tensor& grad_output, const at::Tensor& input) {
  return input.dim() == 3 && grad_output.dim() == 3 && grad_output.scalar_type() != at::kDouble &&
         (lies_as_channels_last_image(input) || lies_as_channels_last_image(grad_output));
}

// A tensor of a 1-d convolution as images of height 1. PyTorch makes it contiguous before it copies
// it into channels_last; one that lies so already is not copied here.
inline at::Tensor as_images(const at::Tensor& tensor) {
  return (lies_as_channels_last_image(tensor) ? tensor : tensor.contiguous()).unsqueeze(2);
}

// What suggest_memory_format() says of a new tensor of this layout.
inline at::MemoryFormat suggested_by_new(at::IntArrayRef size, at::MemoryFormat format) {
  const bool is_ambiguous =
      std::all_of(size.begin() + 1, size.end(), [](int64_t n) { return n == 1; });
  return is_ambiguous ? at::MemoryFormat::Contiguous : format;
}

// What suggest_memory_format() says of tensor.contiguous(format), which copies nothing where the
// strides can be read as this layout too.
inline at::MemoryFormat suggested_by_contiguous(const at::Tensor& tensor, at::MemoryFormat format) {
  if (!tensor.is_contiguous(format)) return suggested_by_new(tensor.sizes(), format);
  const bool is_image = tensor.dim() == 3 && is_channels_last_image(tensor);
  return is_image ? at::MemoryFormat::ChannelsLast : tensor.suggest_memory_format();
}

struct GradientLayouts {
  at::MemoryFormat of_input;
  at::MemoryFormat of_weight;
};

// The layouts of the gradients of a convolution that is no image of height 1. Those of a 1-d one
// may be channels_last all the same, as images.
//   wants_weight: whether the gradient of the weight is computed; else PyTorch takes the input as
//     it is
inline GradientLayouts gradient_layouts(const at::Tensor& grad_output, const at::Tensor& input,
                                        const at::Tensor& weight, bool transposed,
                                        bool wants_weight) {
  const auto dtype = input.scalar_type();
  const auto of_input = wants_weight
                            ? suggested_by_contiguous(input, conv_memory_format(input, weight))
                            : input.suggest_memory_format();
  // A convolution's backward calls grad_output.to(of_input), and that of a transposed one
  // grad_output.contiguous(of_input).
  auto of_gradient = of_input;
  if (transposed) {
    of_gradient = suggested_by_contiguous(grad_output, of_input);
  } else if (grad_output.suggest_memory_format() != of_input) {
    of_gradient = suggested_by_new(grad_output.sizes(), of_input);
  }
  return {conv_memory_format(of_gradient, weight.suggest_memory_format(), dtype),
          conv_memory_format(of_gradient, of_input, dtype)};
}

// The tensor with exactly the strides that a new one of this layout has, also where a size of 1
// leaves them open. It is copied only if its elements have other places.
inline at::Tensor with_strides_of(at::MemoryFormat format, const at::Tensor& tensor) {
  const auto size = tensor.sizes();  // of a 1-d convolution too: images of height 1
  const auto strides = dense_strides(size, format != at::MemoryFormat::Contiguous);
  if (tensor.strides() == at::IntArrayRef(strides)) return tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (size[d] > 1 && tensor.stride(d) != strides[d]) {
      return at::empty_strided(size, strides, tensor.options()).copy_(tensor);
    }
  }
  return tensor.as_strided(size, strides);
}

// The arguments of a 1-d convolution for images of height 1.
template <typename Int>
struct OfHeight1 {
  std::vector<Int> stride, padding, dilation, output_padding;

  OfHeight1(c10::ArrayRef<Int> stride, c10::ArrayRef<Int> padding, c10::ArrayRef<Int> dilation,
            c10::ArrayRef<Int> output_padding = {})
      : stride(with(1, stride)),
        padding(with(0, padding)),
        dilation(with(1, dilation)),
        output_padding(with(0, output_padding)) {}

  // One value, or the paddings before and after.
  static std::vector<Int> with(int64_t of_height, c10::ArrayRef<Int> values) {
    std::vector<Int> found;
    for (const Int& value : values) {
      found.emplace_back(of_height);
      found.push_back(value);
    }
    return found;
  }
};

}  // namespace cudnn_autotune
