#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <initializer_list>
#include <string>

#include "norm_ops.h"

namespace cudnn_autotune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Whether autograd has to record a call of these tensors: a recorded call costs the host more.
bool is_recorded(std::initializer_list<const at::Tensor*> tensors,
                 std::initializer_list<const OptionalTensor*> optional) {
  const auto is_differentiated = [](const at::Tensor& tensor) {
    return tensor.defined() && ((tensor.requires_grad() && at::GradMode::is_enabled()) ||
                                tensor._fw_grad(/*level=*/0).defined());
  };
  for (const at::Tensor* tensor : tensors) {
    if (is_differentiated(*tensor)) return true;
  }
  for (const OptionalTensor* tensor : optional) {
    if (is_given(*tensor) && is_differentiated(**tensor)) return true;
  }
  return false;
}

struct NormNode : torch::autograd::Function<NormNode> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& residual, const std::string& activation,
                               double eps) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, mean, inv_std, unbiased_var] =
        norm_op().call(input, weight, bias, residual, activation, eps);
    // The least is saved: the output lives on as the next layer's input, a residual may not.
    const bool has_activation = activation != "identity";
    const bool by_output = is_given(residual) && has_activation && is_derived_by_output(activation);
    const auto if_needed = [](const OptionalTensor& tensor, bool is_needed) {
      return is_needed && tensor ? *tensor : at::Tensor();
    };
    context->save_for_backward({input, by_output ? output : at::Tensor(), if_needed(weight, true),
                                if_needed(bias, has_activation && !by_output),
                                if_needed(residual, has_activation && !by_output), mean, inv_std});
    context->saved_data["activation"] = activation;
    context->saved_data["given"] =
        c10::List<bool>({true, is_given(weight), is_given(bias), is_given(residual)});
    context->mark_non_differentiable({mean, inv_std, unbiased_var});
    context->set_materialize_grads(false);
    return {output, mean, inv_std, unbiased_var};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor& grad_output = gradients[0];
    if (!grad_output.defined()) return variable_list(6);
    const auto saved = context->get_saved_variables();
    const auto activation = context->saved_data["activation"].toStringRef();
    const auto given = context->saved_data["given"].toBoolList();
    std::array<bool, 4> mask{};
    size_t edge = 0;  // only tensors that are given have one
    for (size_t i = 0; i < mask.size(); ++i) {
      if (given.get(i)) mask[i] = context->needs_input_grad(edge++);
    }
    // Without an activation the residual's gradient is that of the output.
    const bool passes_on = mask[3] && activation == "identity";
    if (passes_on) mask[3] = false;
    auto [grad_input, grad_weight, grad_bias, grad_residual] = norm_backward_op().call(
        grad_output, std::nullopt, saved[0], if_defined(saved[1]), if_defined(saved[2]),
        if_defined(saved[3]), if_defined(saved[4]), saved[5], saved[6], activation, mask);
    if (passes_on) grad_residual = grad_output;
    return {grad_input, grad_weight, grad_bias, grad_residual, at::Tensor(), at::Tensor()};
  }
};

FourTensors norm_autograd(const at::Tensor& input, const OptionalTensor& weight,
                          const OptionalTensor& bias, const OptionalTensor& residual,
                          std::string_view activation, double eps) {
  if (!is_recorded({&input}, {&weight, &bias, &residual})) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return norm_op().call(input, weight, bias, residual, activation, eps);
  }
  const auto found = NormNode::apply(input, weight, bias, residual, std::string(activation), eps);
  return {found[0], found[1], found[2], found[3]};
}

// The gradients have no derivatives of their own.
struct NormBackwardNode : torch::autograd::Function<NormBackwardNode> {
  static variable_list forward(AutogradContext* /*context*/, const at::Tensor& grad_output,
                               const OptionalTensor& grad_output_2, const at::Tensor& input,
                               const OptionalTensor& output, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& residual,
                               const at::Tensor& mean, const at::Tensor& inv_std,
                               const std::string& activation, std::array<bool, 4> output_mask) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [grad_input, grad_weight, grad_bias, grad_residual] =
        norm_backward_op().call(grad_output, grad_output_2, input, output, weight, bias, residual,
                                mean, inv_std, activation, output_mask);
    variable_list asked;  // autograd takes no undefined results
    for (const auto& gradient : {grad_input, grad_weight, grad_bias, grad_residual}) {
      if (gradient.defined()) asked.push_back(gradient);
    }
    return asked;
  }

  static variable_list backward(AutogradContext* /*context*/, const variable_list& /*gradients*/) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "cudnn_autotune::batch_norm_act_backward has no derivative: for second derivatives leave "
        "the norm to PyTorch");
  }
};

FourTensors norm_backward_autograd(const at::Tensor& grad_output,
                                   const OptionalTensor& grad_output_2, const at::Tensor& input,
                                   const OptionalTensor& output, const OptionalTensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& residual,
                                   const at::Tensor& mean, const at::Tensor& inv_std,
                                   std::string_view activation, std::array<bool, 4> output_mask) {
  if (!is_recorded({&grad_output, &input, &mean, &inv_std},
                   {&grad_output_2, &output, &weight, &bias, &residual})) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return norm_backward_op().call(grad_output, grad_output_2, input, output, weight, bias,
                                   residual, mean, inv_std, activation, output_mask);
  }
  const auto asked =
      NormBackwardNode::apply(grad_output, grad_output_2, input, output, weight, bias, residual,
                              mean, inv_std, std::string(activation), output_mask);
  std::array<at::Tensor, 4> found;
  size_t next = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (output_mask[i]) found[i] = asked[next++];
  }
  return {found[0], found[1], found[2], found[3]};
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

bool is_derived_by_output(std::string_view activation) {
  return activation == "relu" || activation == "relu6" || activation == "sigmoid";
}

}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, Autograd, m) {
  m.impl("batch_norm_act", cudnn_autotune::norm_autograd);
  m.impl("batch_norm_act_backward", cudnn_autotune::norm_backward_autograd);
}
