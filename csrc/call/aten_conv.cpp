#include "call/aten_conv.h"

#include <ATen/ops/add.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/conv_transpose1d.h>
#include <ATen/ops/conv_transpose2d.h>
#include <ATen/ops/conv_transpose3d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/prelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/relu6.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace cudnn_autotune {
namespace {

// ATen's convolution pads both sides alike. This splits the padding into what both sides have, and
// what one side has more, which is padded onto the input beforehand.
struct SplitPadding {
  c10::DimVector both;   // for ATen's convolution, one entry a spatial dimension
  c10::DimVector extra;  // for constant_pad_nd: (before, after) a dimension, the last one first

  SplitPadding(const ConvGeometry& geometry, size_t spatial_dims) {
    const auto check = [&](const char* name, size_t size, size_t most) {
      TORCH_CHECK_VALUE(size == spatial_dims || size == most, name, " must have ", spatial_dims,
                        most == spatial_dims ? "" : " or " + std::to_string(most), " entries, got ",
                        size);
    };
    check("stride", geometry.stride.size(), spatial_dims);
    check("dilation", geometry.dilation.size(), spatial_dims);
    check("padding", geometry.padding.size(), 2 * spatial_dims);
    bool asymmetric = false;
    for (size_t d = 0; d < spatial_dims; ++d) {
      both.push_back(std::min(geometry.pre_padding(d), geometry.post_padding(d)));
      asymmetric |= geometry.pre_padding(d) != geometry.post_padding(d);
    }
    for (size_t d = spatial_dims; asymmetric && d-- > 0;) {
      extra.push_back(geometry.pre_padding(d) - both[d]);
      extra.push_back(geometry.post_padding(d) - both[d]);
    }
  }

  at::Tensor pad(const at::Tensor& input) const {
    return extra.empty() ? input : at::constant_pad_nd(input, extra, 0);
  }

  at::Tensor unpad(at::Tensor grad_input, at::IntArrayRef input_size) const {
    for (size_t i = 0; i < extra.size() / 2; ++i) {
      const auto dim = static_cast<int64_t>(input_size.size() - 1 - i);
      grad_input = grad_input.narrow(dim, extra[2 * i], input_size[dim]);
    }
    return extra.empty() ? grad_input : grad_input.contiguous(grad_input.suggest_memory_format());
  }

  c10::DimVector padded_size(at::IntArrayRef input_size) const {
    c10::DimVector size(input_size.begin(), input_size.end());
    for (size_t i = 0; i < extra.size() / 2; ++i) {
      size[size.size() - 1 - i] += extra[2 * i] + extra[2 * i + 1];
    }
    return size;
  }
};

size_t spatial_dims(int64_t weight_dims) {
  TORCH_CHECK_VALUE(weight_dims >= 3 && weight_dims <= 5,
                    "weight must have 3 to 5 dimensions, got ", weight_dims);
  return static_cast<size_t>(weight_dims - 2);
}

at::Tensor backward(const at::Tensor& grad_output, const at::Tensor& input,
                    const at::Tensor& weight, const SplitPadding& split,
                    const ConvGeometry& geometry, bool of_input) {
  const OwnPathGuard guard;
  const c10::DimVector output_padding(split.both.size(), 0);
  const auto grads = at::convolution_backward(grad_output, input, weight, std::nullopt,
                                              geometry.stride, split.both, geometry.dilation,
                                              /*transposed=*/false, output_padding, geometry.groups,
                                              std::array<bool, 3>{of_input, !of_input, false});
  return of_input ? std::get<0>(grads) : std::get<1>(grads);
}

// A tensor without values in place of the one whose gradient is computed: convolution_backward
// reads only its shape and layout.
at::Tensor placeholder(at::IntArrayRef size, const at::Tensor& first, const at::Tensor& second) {
  const auto format = first.suggest_memory_format();
  const bool is_plain = format == at::MemoryFormat::Contiguous;
  return at::empty(size, first.options(), is_plain ? second.suggest_memory_format() : format);
}

at::Tensor fprop(const at::Tensor& input, const at::Tensor& weight,
                 const std::optional<at::Tensor>& bias, const ConvGeometry& geometry) {
  const OwnPathGuard guard;
  const SplitPadding split(geometry, spatial_dims(weight.dim()));
  const auto& [stride, dilation, groups] =
      std::tie(geometry.stride, geometry.dilation, geometry.groups);
  // at::conv1d, conv2d and conv3d are called, as torch.nn.functional does, because their error
  // messages are those that users know.
  switch (stride.size()) {
    case 1:
      return at::conv1d(split.pad(input), weight, bias, stride, split.both, dilation, groups);
    case 2:
      return at::conv2d(split.pad(input), weight, bias, stride, split.both, dilation, groups);
    default:
      return at::conv3d(split.pad(input), weight, bias, stride, split.both, dilation, groups);
  }
}

thread_local int guards_of_this_thread = 0;

}  // namespace

bool in_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

OwnPathGuard::OwnPathGuard() noexcept { ++guards_of_this_thread; }
OwnPathGuard::~OwnPathGuard() { --guards_of_this_thread; }
bool OwnPathGuard::is_active() { return guards_of_this_thread > 0; }

at::Tensor aten_transpose(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                          at::IntArrayRef padding, at::IntArrayRef output_padding,
                          at::IntArrayRef dilation, int64_t groups) {
  const OwnPathGuard guard;
  switch (spatial_dims(weight.dim())) {
    case 1:
      return at::conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups,
                                  dilation);
    case 2:
      return at::conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups,
                                  dilation);
    default:
      return at::conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups,
                                  dilation);
  }
}

at::Tensor aten_dgrad(const at::Tensor& grad_output, const at::Tensor& weight,
                      const ConvGeometry& geometry) {
  const SplitPadding split(geometry, spatial_dims(weight.dim()));
  const auto input = placeholder(split.padded_size(geometry.input_size), grad_output, weight);
  return split.unpad(backward(grad_output, input, weight, split, geometry, /*of_input=*/true),
                     geometry.input_size);
}

at::Tensor aten_wgrad(const at::Tensor& grad_output, const at::Tensor& input,
                      const ConvGeometry& geometry) {
  const auto size = geometry.weight_size;
  const SplitPadding split(geometry, spatial_dims(static_cast<int64_t>(size.size())));
  const auto weight = placeholder(size, grad_output, input);
  return backward(grad_output, split.pad(input), weight, split, geometry, /*of_input=*/false);
}

Activation activation_of_call(std::string_view name) {
  try {
    return parse_activation(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

at::Tensor aten_fused(const at::Tensor& input, const at::Tensor& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& residual, const ConvGeometry& geometry,
                      const Activation& activation, const std::optional<at::Tensor>& slope) {
  TORCH_CHECK_VALUE(activation.kind != ActivationKind::prelu || input.dim() == weight.dim(),
                    "input must have a batch with the activation prelu, got ", input.dim(),
                    " dimensions and a weight of ", weight.dim());
  return aten_epilogue(fprop(input, weight, bias, geometry), residual, activation, slope);
}

at::Tensor aten_epilogue(const at::Tensor& result, const std::optional<at::Tensor>& residual,
                         const Activation& activation, const std::optional<at::Tensor>& slope) {
  const bool has_slope = slope && slope->defined();
  TORCH_CHECK_VALUE(has_slope == (activation.kind == ActivationKind::prelu),
                    "slope must be a tensor with the activation prelu, and None with any other");
  at::Tensor sum = result;
  if (residual && residual->defined()) {
    TORCH_CHECK_VALUE(residual->sym_sizes() == result.sym_sizes() &&
                          residual->scalar_type() == result.scalar_type(),
                      "residual must have the output's shape and dtype, ", result.sym_sizes(),
                      " and ", result.scalar_type(), ", got ", residual->sym_sizes(), " and ",
                      residual->scalar_type());
    sum = at::add(result, *residual);
  }
  switch (activation.kind) {
    case ActivationKind::none:
      return sum;
    case ActivationKind::relu:
      return at::relu(sum);
    case ActivationKind::silu:
      return at::silu(sum);
    case ActivationKind::gelu:
      return at::gelu(sum, "none");
    case ActivationKind::gelu_tanh:
      return at::gelu(sum, "tanh");
    case ActivationKind::sigmoid:
      return at::sigmoid(sum);
    case ActivationKind::hardswish:
      return at::hardswish(sum);
    case ActivationKind::relu6:
      return at::relu6(sum);
    case ActivationKind::tanh:
      return at::tanh(sum);
    case ActivationKind::mish:
      return at::mish(sum);
    case ActivationKind::leaky_relu:
      return at::leaky_relu(sum, activation.parameter);
    case ActivationKind::elu:
      return at::elu(sum, activation.parameter);
    case ActivationKind::prelu:
      TORCH_CHECK_VALUE(slope->dim() == 1 && slope->sym_size(0) == sum.sym_size(1) &&
                            slope->scalar_type() == sum.scalar_type(),
                        "slope must have the shape (", sum.sym_size(1), ",) and ",
                        sum.scalar_type(), ", got ", slope->sym_sizes(), " and ",
                        slope->scalar_type());
      return at::prelu(sum, *slope);
  }
  return sum;
}

void copy_result(const at::Tensor& output, const at::Tensor& result) {
  TORCH_CHECK_VALUE(
      output.sizes() == result.sizes() && output.scalar_type() == result.scalar_type(),
      "output must be of size ", result.sizes(), " and ", result.scalar_type(), ", got ",
      output.sizes(), " and ", output.scalar_type());
  output.copy_(result);
}

void add_bias(const at::Tensor& y, const at::Tensor& bias) {
  c10::DimVector over_channels(y.dim(), 1);
  over_channels[1] = bias.size(0);
  y.add_(bias.view(over_channels));
}

}  // namespace cudnn_autotune
