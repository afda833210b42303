#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/var_mean.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "call/aten_conv.h"
#include "core/problem/activation.h"
#include "norm/norm_ops.h"

namespace cudnn_autotune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Whether autograd has to record a call of these tensors: a recorded call costs the host more.
template <typename... Optional>
bool is_recorded(const at::Tensor& input, const Optional&... others) {
  const auto is_differentiated = [](const OptionalTensor& tensor) {
    return is_given(tensor) && ((tensor->requires_grad() && at::GradMode::is_enabled()) ||
                                tensor->_fw_grad(/*level=*/0).defined());
  };
  return is_differentiated(input) || (is_differentiated(others) || ...);
}

bool is_leaky_relu(std::string_view activation) { return activation.rfind("leaky_relu(", 0) == 0; }

// The gradient of an activation's argument, by an operator that has a derivative.
at::Tensor grad_argument(const at::Tensor& grad, const at::Tensor& argument,
                         std::string_view activation) {
  if (activation == "relu") return at::threshold_backward(grad, argument, 0);
  if (activation == "relu6") return at::hardtanh_backward(grad, argument, 0, 6);
  if (activation == "sigmoid") return at::sigmoid_backward(grad, at::sigmoid(argument));
  if (activation == "silu") {  // silu_backward has none
    const auto gate = at::sigmoid(argument);
    return grad * gate * (1 + argument * (1 - gate));
  }
  if (activation == "hardswish") return at::hardswish_backward(grad, argument);
  if (activation == "gelu") return at::gelu_backward(grad, argument, "none");
  if (activation == "gelu_tanh") return at::gelu_backward(grad, argument, "tanh");
  if (is_leaky_relu(activation)) {
    return at::leaky_relu_backward(grad, argument, parse_activation(activation).parameter,
                                   /*self_is_result=*/false);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(activation == "identity", "the second derivative of ", activation,
                              " behind a batch norm is not implemented");
  return grad;
}

// Records a norm that has been computed: its running statistics are updated before anything is
// saved for the backward, as PyTorch's are, because a hook on saved tensors may throw.
struct NormNode : torch::autograd::Function<NormNode> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& residual, std::string_view activation, double eps,
                            const NormOutputs& found) {
    // The least is saved: the mask, or else the output, which lives on as the next layer's input,
    // while a residual may not.
    const bool has_activation = activation != "identity";
    const bool by_output = is_given(residual) && has_activation && is_derived_by_output(activation);
    const bool by_mask =
        by_output && found.mask.sym_numel().sym_gt(0).guard_bool(__FILE__, __LINE__);
    const auto if_needed = [](const OptionalTensor& tensor, bool is_needed) {
      return is_needed && tensor ? *tensor : at::Tensor();
    };
    context->save_for_backward(
        {input,
         by_mask     ? found.mask
         : by_output ? found.output
                     : at::Tensor(),
         if_needed(weight, true), if_needed(bias, has_activation && !by_output),
         if_needed(residual, has_activation && !by_output), found.mean, found.inv_std});
    const std::array<bool, 4> given{true, is_given(weight), is_given(bias), is_given(residual)};
    int64_t bits = 0;
    for (size_t i = 0; i < given.size(); ++i) bits |= static_cast<int64_t>(given[i]) << i;
    context->saved_data["activation"] =
        static_cast<int64_t>(place_of_activation(activation).value());
    context->saved_data["eps"] = eps;
    context->saved_data["given"] = bits;
    context->set_materialize_grads(false);
    return found.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& grad_output = gradients[0];
    if (!grad_output.defined()) return variable_list(kArguments);
    const auto saved = context->get_saved_variables();
    const auto activation = kNormActivations.at(context->saved_data["activation"].toInt());
    const int64_t bits = context->saved_data["given"].toInt();
    const auto is_given = [bits](size_t place) { return ((bits >> place) & 1) != 0; };
    std::array<bool, 4> mask{};
    size_t edge = 0;  // only tensors that are given have one
    for (size_t i = 0; i < mask.size(); ++i) {
      if (is_given(i)) mask[i] = context->needs_input_grad(edge++);
    }
    // Without an activation the residual's gradient is that of the output.
    const bool passes_on = mask[3] && activation == "identity";
    if (passes_on) mask[3] = false;
    // Gradients that are to be differentiated are PyTorch's. What is saved with a residual does not
    // give the activation's argument.
    if (at::GradMode::is_enabled() && !is_given(3)) {
      const auto eps = context->saved_data["eps"].toDouble();
      at::Tensor grad = grad_output;
      if (activation != "identity") {
        const auto argument =
            at::batch_norm(saved[0], if_defined(saved[2]), if_defined(saved[3]), {}, {},
                           /*training=*/true, /*momentum=*/0, eps, /*cudnn_enabled=*/false);
        grad = grad_argument(grad, argument, activation);
      }
      auto [grad_input, grad_weight, grad_bias] = at::native_batch_norm_backward(
          grad, saved[0], if_defined(saved[2]), {}, {}, saved[5], saved[6], /*train=*/true, eps,
          {mask[0], mask[1], mask[2]});
      // PyTorch's kernels may compute more than they are asked for.
      return all_of({grad_input, mask[1] ? grad_weight : at::Tensor(),
                     mask[2] ? grad_bias : at::Tensor(), at::Tensor()});
    }
    std::optional<at::AutoDispatchBelowADInplaceOrView> guard;
    if (!at::GradMode::is_enabled()) guard.emplace();
    auto [grad_input, grad_weight, grad_bias, grad_residual] = norm_backward_op().call(
        grad_output, std::nullopt, saved[0], if_defined(saved[1]), if_defined(saved[2]),
        if_defined(saved[3]), if_defined(saved[4]), saved[5], saved[6], activation, mask);
    if (passes_on) grad_residual = grad_output;
    return all_of({grad_input, grad_weight, grad_bias, grad_residual});
  }

 private:
  static constexpr size_t kArguments = 7;  // of forward

  // The gradients of all arguments, of which those behind the tensors have none.
  static variable_list all_of(variable_list gradients) {
    gradients.resize(kArguments);
    return gradients;
  }
};

NormResults norm_autograd(const at::Tensor& input, const OptionalTensor& weight,
                          const OptionalTensor& bias, const OptionalTensor& residual,
                          std::string_view activation, double eps) {
  auto results = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return norm_op().call(input, weight, bias, residual, activation, eps);
  }();
  if (is_recorded(input, weight, bias, residual)) {
    auto& [output, mean, inv_std, unbiased_var, mask] = results;
    output = NormNode::apply(input, weight, bias, residual, activation, eps,
                             NormOutputs{output, mean, inv_std, mask});
  }
  return results;
}

// The output, the mean and the inverse standard deviation.
using TrackingResults = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using TrackingSignature = TrackingResults(const at::Tensor& input, const OptionalTensor& weight,
                                          const OptionalTensor& bias,
                                          const OptionalTensor& running_mean,
                                          const OptionalTensor& running_var,
                                          std::string_view activation, double momentum, double eps);

const c10::TypedOperatorHandle<TrackingSignature>& tracking_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::batch_norm_act_tracking", "")
                             .typed<TrackingSignature>();
  return op;
}

TrackingResults tracking_norm(const at::Tensor& input, const OptionalTensor& weight,
                              const OptionalTensor& bias, const OptionalTensor& running_mean,
                              const OptionalTensor& running_var, std::string_view activation,
                              double momentum, double eps) {
  auto found =
      compute_norm({input, weight, bias, running_mean, running_var, momentum, eps}, activation);
  return {std::move(found.output), std::move(found.mean), std::move(found.inv_std)};
}

TrackingResults tracking_norm_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                       const OptionalTensor& weight, const OptionalTensor& bias,
                                       const OptionalTensor& running_mean,
                                       const OptionalTensor& running_var,
                                       std::string_view activation, double momentum, double eps) {
  auto results =
      tracking_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, input, weight, bias,
                               running_mean, running_var, activation, momentum, eps);
  if (is_recorded(input, weight, bias)) {
    auto& [output, mean, inv_std] = results;
    output = NormNode::apply(input, weight, bias, no_tensor(), activation, eps,
                             NormOutputs{output, mean, inv_std, {}});
  }
  return results;
}

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

const c10::TypedOperatorHandle<NormSignature>& norm_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::batch_norm_act", "")
                             .typed<NormSignature>();
  return op;
}

const c10::TypedOperatorHandle<NormBackwardSignature>& norm_backward_op() {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::batch_norm_act_backward", "")
                             .typed<NormBackwardSignature>();
  return op;
}

at::Tensor norm_act(const NormCall& call, std::string_view activation) {
  return std::get<0>(tracking_op().call(call.input, call.weight, call.bias, call.running_mean,
                                        call.running_var, activation, call.momentum, call.eps));
}

// It is below autograd, as PyTorch's kernels are: a call that saved the statistics before does not
// take the update for a fault. Keys above it have had their turn.
NormOutputs compute_norm(const NormCall& call, std::string_view activation) {
  const at::AutoDispatchBelowADInplaceOrView guard;
#ifdef CUDNN_AUTOTUNE_WITH_CUDA
  if (auto found = norm_by_kernels(call, activation)) return *std::move(found);
#endif
  const c10::DispatchKeySet backend(call.input.is_cuda() ? c10::DispatchKey::CUDA
                                                         : c10::DispatchKey::CPU);
  const auto [output, mean, inv_std, unbiased_var, mask] = norm_op().redispatch(
      backend, call.input, call.weight, call.bias, std::nullopt, activation, call.eps);
  if (is_given(call.running_mean)) {
    at::_foreach_lerp_({*call.running_mean, *call.running_var}, {mean, unbiased_var},
                       call.momentum);
  }
  return {output, mean, inv_std, mask};
}

bool is_derived_by_output(std::string_view activation) {
  return is_derived_by_mask(activation) || activation == "sigmoid";
}

bool is_derived_by_mask(std::string_view activation) {
  return activation == "relu" || activation == "relu6" || is_leaky_relu(activation);
}

}  // namespace cudnn_autotune

TORCH_LIBRARY_FRAGMENT(cudnn_autotune, m) {
  m.def(
      "batch_norm_act_tracking(Tensor input, Tensor? weight, Tensor? bias, "
      "Tensor(a!)? running_mean, Tensor(b!)? running_var, str activation, float momentum, "
      "float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "group_norm(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps) -> "
      "(Tensor, Tensor)");
  m.def(
      "group_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor statistics, "
      "int groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(cudnn_autotune, CompositeExplicitAutograd, m) {
  m.impl("batch_norm_act_tracking", cudnn_autotune::tracking_norm);
  m.impl("group_norm", cudnn_autotune::group_norm_by_aten);
  m.impl("group_norm_backward", cudnn_autotune::group_gradients_by_aten);
}

TORCH_LIBRARY_IMPL(cudnn_autotune, Autograd, m) {
  m.impl("batch_norm_act", cudnn_autotune::norm_autograd);
  m.impl("batch_norm_act_tracking", TORCH_FN(cudnn_autotune::tracking_norm_autograd));
  // With a residual the gradients have no derivatives of their own.
  m.impl("batch_norm_act_backward", torch::autograd::autogradNotImplementedFallback());
}
