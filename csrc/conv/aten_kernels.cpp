#include "conv/aten_kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_backward_cuda_dispatch.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_ops.h>
#include <c10/util/DimVector.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "call/aten_conv.h"
#include "call/call_policy.h"
#include "call/conv_geometry.h"
#include "call/conv_layout.h"
#include "call/fallback_counts.h"
#include "conv/detail/conv_checks.h"
#include "conv/detail/conv_cuda.h"
#include "norm/aten_norms.h"

namespace cudnn_autotune {
namespace {

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// A call of aten::convolution without its bias.
struct AtenCall {
  const at::Tensor& input;
  const at::Tensor& weight;
  c10::DimVector stride;
  c10::DimVector padding;
  c10::DimVector dilation;
  bool transposed;
  c10::DimVector output_padding;  // has no effect unless transposed
  int64_t groups;

  AtenCall(const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
           at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
           at::IntArrayRef output_padding, int64_t groups)
      : input(input),
        weight(weight),
        stride(for_each_dim(stride)),
        padding(for_each_dim(padding)),
        dilation(for_each_dim(dilation)),
        transposed(transposed),
        output_padding(for_each_dim(output_padding)),
        groups(groups) {}

  // A list of one stands for all spatial dimensions; padding="valid" comes as one.
  c10::DimVector for_each_dim(at::IntArrayRef values) const {
    const int64_t n = weight.dim() - 2;
    if (values.size() != 1 || n < 1) return {values.begin(), values.end()};
    return c10::DimVector(n, values[0]);
  }

  // Null if all lists have an entry for each spatial dimension, and all numbers are such that sizes
  // can be computed without overflow; else the reason to leave the call to PyTorch.
  const char* why_not_plain() const {
    const int64_t n = weight.dim() - 2;
    const std::array<at::IntArrayRef, 4> lists{stride, padding, dilation, output_padding};
    const std::array<at::IntArrayRef, 2> sizes{input.sizes(), weight.sizes()};
    const auto all = [](const auto& groups_of_values, const auto& holds) {
      return std::all_of(groups_of_values.begin(), groups_of_values.end(), holds);
    };
    const auto is_negative = [](int64_t value) { return value < 0; };
    const auto is_large = [](int64_t value) { return value > ConvGeometry::kMostCounted; };
    const auto has_none = [](const auto& test) {
      return [&test](at::IntArrayRef values) {
        return std::none_of(values.begin(), values.end(), test);
      };
    };
    const auto has_all_dims = [n](at::IntArrayRef values) {
      return static_cast<int64_t>(values.size()) == n;
    };
    if (n < 1 || input.dim() != n + 2 || groups < 1 || !all(lists, has_all_dims) ||
        !all(lists, has_none(is_negative)) || !all(sizes, has_none(is_large))) {
      return kNotTaken;
    }
    return is_large(groups) || !all(lists, has_none(is_large)) ? kNotCounted : nullptr;
  }

  // The size of the output, if the convolution is transposed; nothing if it is the gradient of
  // none.
  std::optional<std::vector<int64_t>> transposed_size() const {
    return transposed_output_size(input, weight, stride, padding, output_padding, dilation, groups);
  }

  // That of the forward convolution. A transposed one is the gradient of one whose input has the
  // size of its output.
  ConvGeometry geometry(at::IntArrayRef forward_input_size) const {
    return {forward_input_size, weight.sizes(), stride, padding, dilation, groups};
  }
};

// The operators' kernels, called with arguments that they share.
struct Operators {
  const AtenCall& call;
  const OperatorPolicy& policy;

  at::Tensor fprop(const at::Tensor& x, const at::Tensor& w,
                   const std::optional<at::Tensor>& bias) const {
    return conv_fprop(x, w, bias, call.stride, call.padding, call.dilation, call.groups,
                      policy.sampling, policy.workspace_limit);
  }
  at::Tensor dgrad(const at::Tensor& y, const at::Tensor& w, at::IntArrayRef size) const {
    return conv_dgrad(y, w, size, call.stride, call.padding, call.dilation, call.groups,
                      policy.sampling, policy.workspace_limit);
  }
  at::Tensor wgrad(const at::Tensor& y, const at::Tensor& x, at::IntArrayRef size) const {
    return conv_wgrad(y, x, size, call.stride, call.padding, call.dilation, call.groups,
                      policy.sampling, policy.workspace_limit);
  }
};

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  const auto own_path = [&](const char* reason = nullptr) {
    if (reason != nullptr) count_fallback(reason);
    return at::compositeexplicitautograd::convolution(input, weight, bias, stride, padding,
                                                      dilation, transposed, output_padding, groups);
  };
  const auto policy = policy_of_call(input);
  if (!policy) return own_path();
  const AtenCall call{input, weight, stride, padding, dilation, transposed, output_padding, groups};
  if (const char* reason = call.why_not_plain()) return own_path(reason);
  if (is_image_of_height_1(input, weight, /*pads=*/false)) {
    const OfHeight1<int64_t> images(call.stride, call.padding, call.dilation, call.output_padding);
    return cudnn_autotune::convolution(as_images(input), weight.unsqueeze(2), bias, images.stride,
                                       images.padding, images.dilation, transposed,
                                       images.output_padding, groups)
        .squeeze(2);
  }
  const bool has_bias = bias && bias->defined();
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  if (has_bias && !bias_fits(*bias, input, channels)) return own_path(kNotTaken);
  const Operators operators{call, *policy};
  if (!transposed) {
    const char* reason = why_not_cudnn(input, weight, call.geometry(input.sizes()));
    if (reason != nullptr) return own_path(reason);
    const bool records = at::GradMode::is_enabled();
    const ExpectedGradientsGuard expected(
        {records && input.requires_grad(), records && weight.requires_grad()});
    return operators.fprop(input, weight, bias);
  }
  const auto size = call.transposed_size();
  const char* reason = size ? why_not_cudnn(input, weight, call.geometry(*size)) : kNotTaken;
  if (reason != nullptr) return own_path(reason);
  const at::Tensor y = operators.dgrad(input, weight, *size);
  if (has_bias) add_bias(y, *bias);
  return y;
}

Gradients convolution_backward(const at::Tensor& grad_output, const at::Tensor& input,
                               const at::Tensor& weight, at::OptionalIntArrayRef bias_sizes,
                               at::IntArrayRef stride, at::IntArrayRef padding,
                               at::IntArrayRef dilation, bool transposed,
                               at::IntArrayRef output_padding, int64_t groups,
                               std::array<bool, 3> output_mask) {
  const auto own_path = [&](const char* reason = nullptr) -> Gradients {
    if (reason != nullptr) count_fallback(reason);
    const auto kernel = grad_output.is_cuda() ? at::cuda::convolution_backward
                                              : at::compositeexplicitautograd::convolution_backward;
    return kernel(grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed,
                  output_padding, groups, output_mask);
  };
  const auto policy = policy_of_call(input);
  if (!policy) return own_path();
  const AtenCall call{input, weight, stride, padding, dilation, transposed, output_padding, groups};
  if (const char* reason = call.why_not_plain()) return own_path(reason);
  if (grad_output.scalar_type() != input.scalar_type() || grad_output.device() != input.device()) {
    return own_path(kNotTaken);
  }
  if (grad_output.dim() == 3 && is_image_of_height_1(input, weight, /*pads=*/false)) {
    const OfHeight1<int64_t> images(call.stride, call.padding, call.dilation, call.output_padding);
    auto [of_input, of_weight, of_bias] = cudnn_autotune::convolution_backward(
        grad_output.unsqueeze(2), as_images(input), weight.unsqueeze(2), bias_sizes, images.stride,
        images.padding, images.dilation, transposed, images.output_padding, groups, output_mask);
    if (of_input.defined()) of_input = of_input.squeeze(2);
    if (of_weight.defined()) of_weight = of_weight.squeeze(2);
    return {of_input, of_weight, of_bias};
  }
  const auto geometry = call.geometry(transposed ? grad_output.sizes() : input.sizes());
  if (const char* reason = why_not_cudnn(input, weight, geometry)) return own_path(reason);
  const auto output_size = transposed ? call.transposed_size() : geometry.output_size();
  if (!output_size || grad_output.sizes() != at::IntArrayRef(*output_size)) {
    return own_path(kNotTaken);
  }

  // The gradient is brought into the forward's layout once, and both results into those that
  // PyTorch gives them; mostly they have them already.
  const Operators operators{call, *policy};
  const auto layouts =
      gradient_layouts(grad_output, input, weight, transposed, /*wants_weight=*/output_mask[1]);
  const at::Tensor gradient = grad_output.contiguous(conv_memory_format(input, weight));
  Gradients result;
  auto& [grad_input, grad_weight, grad_bias] = result;
  if (output_mask[0]) {
    grad_input = transposed ? operators.fprop(gradient, weight, std::nullopt)
                            : operators.dgrad(gradient, weight, input.sizes());
    grad_input = with_strides_of(layouts.of_input, grad_input);
  }
  if (output_mask[1]) {
    grad_weight = transposed ? operators.wgrad(input, gradient, weight.sizes())
                             : operators.wgrad(gradient, input, weight.sizes());
    grad_weight = with_strides_of(layouts.of_weight, grad_weight);
  }
  if (output_mask[2]) {
    c10::DimVector all_but_channels{0};
    for (int64_t d = 2; d < gradient.dim(); ++d) all_but_channels.push_back(d);
    grad_bias = gradient.sum(all_but_channels);
  }
  return result;
}

// PyTorch has one kernel for autograd on all backends. The key of those that have no autograd key
// of their own leads to it past the kernels below, and it removes that key again. Keys above
// autograd have had their turn.
c10::DispatchKeySet to_pytorchs_autograd(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset) | c10::DispatchKeySet(c10::DispatchKey::AutogradOther);
}

// PyTorch's autograd, which calls the kernels above, and the policy for the derivative of the
// result.
at::Tensor convolution_with_derivative(c10::DispatchKeySet keys, const at::Tensor& input,
                                       const at::Tensor& weight,
                                       const std::optional<at::Tensor>& bias,
                                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                       c10::SymIntArrayRef dilation, bool transposed,
                                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  at::Tensor output = at::_ops::convolution::redispatch(to_pytorchs_autograd(keys), input, weight,
                                                        bias, stride, padding, dilation, transposed,
                                                        output_padding, std::move(groups));
  label_derivative(input, output);
  return output;
}

Gradients convolution_backward_with_derivative(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& input,
    const at::Tensor& weight, at::OptionalSymIntArrayRef bias_sizes, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> output_mask) {
  Gradients gradients = at::_ops::convolution_backward::redispatch(
      to_pytorchs_autograd(keys), grad_output, input, weight, bias_sizes, stride, padding, dilation,
      transposed, output_padding, std::move(groups), output_mask);
  // They have one node in common.
  const auto& [of_input, of_weight, of_bias] = gradients;
  for (const at::Tensor* gradient : {&of_input, &of_weight, &of_bias}) {
    if (gradient->defined()) label_derivative(input, *gradient);
  }
  return gradients;
}

// PyTorch warns where a kernel takes the place of another, as here is meant.
class WithoutWarnings {
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

}  // namespace

AtenKernels::AtenKernels(c10::DispatchKey backend) {
  const WithoutWarnings guard;
  const auto library_for = [](c10::DispatchKey key) {
    return std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__,
                                            static_cast<uint32_t>(__LINE__));
  };
  kernels_ = library_for(backend);
  kernels_->impl("convolution", TORCH_FN(convolution));
  kernels_->impl("convolution_backward", TORCH_FN(convolution_backward));
  kernels_->impl("native_group_norm", TORCH_FN(native_group_norm));
  kernels_->impl("native_batch_norm", TORCH_FN(native_batch_norm));
  kernels_->impl("native_batch_norm_backward", TORCH_FN(native_batch_norm_backward));
  kernels_->impl("cudnn_batch_norm", TORCH_FN(cudnn_batch_norm));
  kernels_->impl("cudnn_batch_norm_backward", TORCH_FN(cudnn_batch_norm_backward));
  above_ = library_for(c10::getAutogradKeyFromBackend(c10::toBackendComponent(backend)));
  above_->impl("convolution", TORCH_FN(convolution_with_derivative));
  above_->impl("convolution_backward", TORCH_FN(convolution_backward_with_derivative));
}

AtenKernels::~AtenKernels() = default;

}  // namespace cudnn_autotune
