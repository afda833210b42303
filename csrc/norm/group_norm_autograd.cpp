#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/var_mean.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <tuple>
#include <vector>

#include "call/aten_conv.h"
#include "norm/norm_autograd.h"
#include "norm/norm_ops.h"

namespace cudnn_autotune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A tensor in the order (N, *spatial, C) in memory.
at::Tensor laid_in_rows(const at::Tensor& tensor) {
  return tensor.movedim(1, -1).contiguous().movedim(-1, 1);
}

// The groups of all images, with a last dimension of their numbers, in float32.
at::Tensor as_groups(const at::Tensor& tensor, int64_t groups) {
  return tensor.to(at::kFloat).reshape({tensor.size(0), groups, -1});
}

// A vector of the channels, for a tensor of `dims` dimensions, in float32.
at::Tensor by_channel(const at::Tensor& values, int64_t dims) {
  std::vector<int64_t> shape(dims, 1);
  shape[1] = values.size(0);
  return values.to(at::kFloat).view(shape);
}

// The input of a group norm, normalized, by ATen's operators, and what it is multiplied with.
struct NormalizedGroups {
  at::Tensor values, inv_std;  // as as_groups() has them

  static NormalizedGroups by_own_statistics(const at::Tensor& input, int64_t groups, double eps) {
    const at::Tensor numbers = as_groups(input, groups);
    const auto [var, mean] = at::var_mean(numbers, at::IntArrayRef{2}, /*correction=*/0,
                                          /*keepdim=*/true);
    const at::Tensor inv_std = (var + eps).rsqrt();
    return {(numbers - mean) * inv_std, inv_std};
  }
};

std::tuple<at::Tensor, at::Tensor> group_norm_by_aten(const at::Tensor& input,
                                                      const OptionalTensor& weight,
                                                      const OptionalTensor& bias, int64_t groups,
                                                      double eps) {
  const auto [values, inv_std] = NormalizedGroups::by_own_statistics(input, groups, eps);
  at::Tensor output = values.reshape(input.sizes());
  if (is_given(weight)) output = output * by_channel(*weight, input.dim());
  if (is_given(bias)) output = output + by_channel(*bias, input.dim());
  const at::Tensor mean = as_groups(input, groups).mean(2);
  output = output.to(input.scalar_type());
  return {is_in_rows(input) ? laid_in_rows(output) : output, at::stack({mean, inv_std.squeeze(2)})};
}

// The gradients of a group norm, by ATen's operators: they can be differentiated.
GroupGradients gradients_of_groups(const at::Tensor& grad_output, const at::Tensor& input,
                                   const OptionalTensor& weight, const NormalizedGroups& normalized,
                                   std::array<bool, 3> output_mask) {
  const auto& [values, inv_std] = normalized;
  std::vector<int64_t> all_but_channels{0};
  for (int64_t d = 2; d < input.dim(); ++d) all_but_channels.push_back(d);
  at::Tensor grad = grad_output.to(at::kFloat);
  GroupGradients found;
  auto& [of_input, of_weight, of_bias] = found;
  const auto dtype = is_given(weight) ? weight->scalar_type() : at::kFloat;
  if (output_mask[1]) {
    of_weight = (grad * values.reshape(input.sizes())).sum(all_but_channels).to(dtype);
  }
  if (output_mask[2]) of_bias = grad.sum(all_but_channels).to(dtype);
  if (output_mask[0]) {
    if (is_given(weight)) grad = grad * by_channel(*weight, input.dim());
    grad = as_groups(grad, inv_std.size(1));
    const at::Tensor constant = grad.mean(2, true), slope = (grad * values).mean(2, true);
    grad = (grad - constant - values * slope) * inv_std;
    of_input = laid_in_rows(grad.reshape(input.sizes()).to(input.scalar_type()));
  }
  return found;
}

GroupGradients group_gradients_by_aten(const at::Tensor& grad_output, const at::Tensor& input,
                                       const OptionalTensor& weight, const at::Tensor& statistics,
                                       int64_t groups, std::array<bool, 3> output_mask) {
  const at::Tensor mean = statistics[0].unsqueeze(2), inv_std = statistics[1].unsqueeze(2);
  const NormalizedGroups normalized{(as_groups(input, groups) - mean) * inv_std, inv_std};
  return gradients_of_groups(grad_output, input, weight, normalized, output_mask);
}

// Records a group norm that has been computed.
struct GroupNormNode : torch::autograd::Function<GroupNormNode> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            int64_t groups, double eps,
                            const std::tuple<at::Tensor, at::Tensor>& found) {
    const auto& [output, statistics] = found;
    context->save_for_backward({input, weight.value_or(at::Tensor()), statistics});
    context->saved_data["groups"] = groups;
    context->saved_data["eps"] = eps;
    context->saved_data["has_parameters"] = is_given(weight) && is_given(bias);
    context->set_materialize_grads(false);
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    constexpr size_t kArguments = 6;  // of forward
    variable_list found(kArguments);
    if (!gradients[0].defined()) return found;
    const auto saved = context->get_saved_variables();
    const auto weight = if_defined(saved[1]);
    const int64_t groups = context->saved_data["groups"].toInt();
    std::array<bool, 3> mask{context->needs_input_grad(0)};
    if (context->saved_data["has_parameters"].toBool()) {
      for (size_t i = 1; i < mask.size(); ++i) mask[i] = context->needs_input_grad(i);
    }
    // The operator has no derivative, and no rule for transforms, such as gradients in a batch.
    if (at::GradMode::is_enabled() || in_transform()) {
      const auto normalized = NormalizedGroups::by_own_statistics(
          saved[0], groups, context->saved_data["eps"].toDouble());
      std::tie(found[0], found[1], found[2]) =
          gradients_of_groups(gradients[0], saved[0], weight, normalized, mask);
      return found;
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(found[0], found[1], found[2]) =
        group_norm_backward_op().call(gradients[0], saved[0], weight, saved[2], groups, mask);
    return found;
  }
};

}  // namespace

at::Tensor group_norm_in_rows(const NormCall& call, int64_t groups) {
  const auto found = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return group_norm_op().call(call.input, call.weight, call.bias, groups, call.eps);
  }();
  if (!is_recorded(call.input, call.weight, call.bias)) return std::get<0>(found);
  return GroupNormNode::apply(call.input, call.weight, call.bias, groups, call.eps, found);
}

const c10::TypedOperatorHandle<GroupNormSignature>& group_norm_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::group_norm", "")
                             .typed<GroupNormSignature>();
  return op;
}

const c10::TypedOperatorHandle<GroupNormBackwardSignature>& group_norm_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::group_norm_backward", "")
                             .typed<GroupNormBackwardSignature>();
  return op;
}

}  // namespace cudnn_autotune

TORCH_LIBRARY_FRAGMENT(cudnn_autotune, m) {
  m.def(
      "group_norm(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps) -> "
      "(Tensor, Tensor)");
  m.def(
      "group_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor statistics, "
      "int groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(cudnn_autotune, CompositeExplicitAutograd, m) {
  m.impl("group_norm", cudnn_autotune::group_norm_by_aten);
  m.impl("group_norm_backward", cudnn_autotune::group_gradients_by_aten);
}
