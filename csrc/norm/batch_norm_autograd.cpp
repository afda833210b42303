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
#include <ATen/ops/threshold_backward.h>
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
#include "norm/norm_autograd.h"
#include "norm/norm_ops.h"

namespace cudnn_autotune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

}  // namespace

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
}

TORCH_LIBRARY_IMPL(cudnn_autotune, CompositeExplicitAutograd, m) {
  m.impl("batch_norm_act_tracking", cudnn_autotune::tracking_norm);
}

TORCH_LIBRARY_IMPL(cudnn_autotune, Autograd, m) {
  m.impl("batch_norm_act", cudnn_autotune::norm_autograd);
  m.impl("batch_norm_act_tracking", TORCH_FN(cudnn_autotune::tracking_norm_autograd));
  // With a residual the gradients have no derivatives of their own.
  m.impl("batch_norm_act_backward", torch::autograd::autogradNotImplementedFallback());
}
