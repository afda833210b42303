#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "aten_conv.h"
#include "conv_layout.h"
#include "conv_ops.h"
#include "expected_gradients.h"
#include "fallback_counts.h"
#include "settings.h"

namespace cudnn_autotune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// The geometry, mode and limits that a backward needs. They are packed into one entry of the
// autograd context, because each entry costs an insertion into a hash map in every call that needs
// a gradient.
struct Arguments {
  static constexpr std::ptrdiff_t kHeader = 5;

  std::vector<c10::SymInt> stride, padding, dilation;
  c10::SymInt groups;
  std::string_view sampling;
  int64_t workspace_limit = -1;
  bool has_bias = false;  // whether the forward had a bias, whose gradient may be needed

  // Saves the mode and limits of the forward call, because the settings may have changed when the
  // backward runs. The forward's kernel gets the call's own arguments and reads them itself: what
  // torch.compile and torch.export record must not depend on the settings of this moment.
  static void save(AutogradContext* ctx, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                   c10::SymIntArrayRef dilation, const c10::SymInt& groups,
                   std::string_view sampling, int64_t workspace_limit, bool has_bias = false) {
    const CallPolicy policy = resolve(sampling, workspace_limit);
    std::vector<c10::SymInt> packed;
    packed.reserve(kHeader + stride.size() + padding.size() + dilation.size());
    packed.emplace_back(static_cast<int64_t>(stride.size()));
    packed.emplace_back(policy.workspace_limit);
    packed.emplace_back(static_cast<int64_t>(has_bias));
    packed.emplace_back(static_cast<int64_t>(policy.sampling));
    packed.push_back(groups);
    packed.insert(packed.end(), stride.begin(), stride.end());
    packed.insert(packed.end(), dilation.begin(), dilation.end());
    packed.insert(packed.end(), padding.begin(), padding.end());
    ctx->saved_data["arguments"] = std::move(packed);
    ctx->set_materialize_grads(false);
  }

  explicit Arguments(AutogradContext* ctx) {
    const auto packed = ctx->saved_data["arguments"].toSymIntVector();
    const auto n = static_cast<std::ptrdiff_t>(packed[0].expect_int());
    workspace_limit = packed[1].expect_int();
    has_bias = packed[2].expect_int() != 0;
    sampling = sampling_name(static_cast<int16_t>(packed[3].expect_int()));
    groups = packed[4];
    const auto begin = packed.begin() + kHeader;
    stride.assign(begin, begin + n);
    dilation.assign(begin + n, begin + 2 * n);
    padding.assign(begin + 2 * n, packed.end());
  }

  at::Tensor fprop(const at::Tensor& input, const at::Tensor& weight) const {
    return conv_fprop_op().call(input, weight, std::nullopt, stride, padding, dilation, groups,
                                sampling, workspace_limit);
  }
  at::Tensor dgrad(const at::Tensor& grad_output, const at::Tensor& weight,
                   c10::SymIntArrayRef input_size) const {
    return conv_dgrad_op().call(grad_output, weight, input_size, stride, padding, dilation, groups,
                                sampling, workspace_limit);
  }
  at::Tensor wgrad(const at::Tensor& grad_output, const at::Tensor& input,
                   c10::SymIntArrayRef weight_size) const {
    return conv_wgrad_op().call(grad_output, input, weight_size, stride, padding, dilation, groups,
                                sampling, workspace_limit);
  }
};

bool is_dual(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// Skips the Autograd key in a backward that records nothing (no double backward is wanted), unless
// the gradient has a forward-mode tangent.
class BelowAutogradUnlessRecording {
 public:
  explicit BelowAutogradUnlessRecording(const at::Tensor& gradient) {
    if (!at::GradMode::is_enabled() && !is_dual(gradient)) guard_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> guard_;
};

// Whether the backward may bring a gradient into the forward's layout. A batch of gradients
// (`is_grads_batched`) has no memory format, and the layout of what a compiler traces is the
// compiler's choice.
bool has_layout(const at::Tensor& tensor) {
  return (tensor.is_cuda() || tensor.is_cpu()) &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
         !tensor.key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
}

// What the backward of one convolution computes: the layouts of PyTorch's gradients, and the
// gradient of the output in the layout of the forward, so that the two convolutions of the backward
// need not copy it each.
struct BackwardTensors {
  Variable of_output;
  std::optional<GradientLayouts> layouts;

  BackwardTensors(const Variable& grad_output, const variable_list& operands, bool transposed,
                  bool wants_weight)
      : of_output(grad_output) {
    if (!has_layout(grad_output)) return;
    const Variable& input = operands[0];
    const Variable& weight = operands[1];
    layouts = gradient_layouts(grad_output, input, weight, transposed, wants_weight);
    of_output = grad_output.contiguous(conv_memory_format(input, weight));
  }

  Variable of_input(const Variable& gradient) const {
    return layouts ? with_strides_of(layouts->of_input, gradient) : gradient;
  }
  Variable of_weight(const Variable& gradient) const {
    return layouts ? with_strides_of(layouts->of_weight, gradient) : gradient;
  }
};

at::Tensor bias_gradient(const at::Tensor& grad_output) {
  std::vector<int64_t> all_but_channels{0};
  for (int64_t d = 2; d < grad_output.dim(); ++d) all_but_channels.push_back(d);
  return grad_output.sum(all_but_channels);
}

// y = x * w + b
struct ConvFprop : torch::autograd::Function<ConvFprop> {
  static Variable forward(AutogradContext* ctx, const Variable& input, const Variable& weight,
                          const std::optional<Variable>& bias, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          const c10::SymInt& groups, std::string_view sampling,
                          int64_t workspace_limit) {
    ctx->save_for_backward({input, weight});
    Arguments::save(ctx, stride, padding, dilation, groups, sampling, workspace_limit,
                    bias && bias->defined());
    const ExpectedGradientsGuard expected({input.requires_grad(), weight.requires_grad()});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return conv_fprop_op().call(input, weight, bias, stride, padding, dilation, groups, sampling,
                                workspace_limit);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(9);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Arguments arguments(ctx);
    const BelowAutogradUnlessRecording guard(grads[0]);
    const bool wants_weight = ctx->needs_input_grad(1);
    const BackwardTensors gradients(grads[0], saved, /*transposed=*/false, wants_weight);
    const Variable& grad_output = gradients.of_output;
    if (ctx->needs_input_grad(0)) {
      result[0] = gradients.of_input(arguments.dgrad(grad_output, saved[1], saved[0].sym_sizes()));
    }
    if (wants_weight) {
      result[1] = gradients.of_weight(arguments.wgrad(grad_output, saved[0], saved[1].sym_sizes()));
    }
    if (arguments.has_bias && ctx->needs_input_grad(2)) result[2] = bias_gradient(grad_output);
    return result;
  }
};

// y = x *' w + b, which is the gradient of the input of a convolution whose output's gradient is x
struct ConvTranspose : torch::autograd::Function<ConvTranspose> {
  static Variable forward(AutogradContext* ctx, const Variable& input, const Variable& weight,
                          const std::optional<Variable>& bias, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef output_padding,
                          c10::SymIntArrayRef dilation, const c10::SymInt& groups,
                          std::string_view sampling, int64_t workspace_limit) {
    ctx->save_for_backward({input, weight});
    Arguments::save(ctx, stride, padding, dilation, groups, sampling, workspace_limit,
                    bias && bias->defined());
    const at::AutoDispatchBelowADInplaceOrView guard;
    return conv_transpose_op().call(input, weight, bias, stride, padding, output_padding, dilation,
                                    groups, sampling, workspace_limit);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(10);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Arguments arguments(ctx);
    const BelowAutogradUnlessRecording guard(grads[0]);
    const bool wants_weight = ctx->needs_input_grad(1);
    const BackwardTensors gradients(grads[0], saved, /*transposed=*/true, wants_weight);
    const Variable& grad_output = gradients.of_output;
    if (ctx->needs_input_grad(0)) {
      result[0] = gradients.of_input(arguments.fprop(grad_output, saved[1]));
    }
    if (wants_weight) {
      result[1] = gradients.of_weight(arguments.wgrad(saved[0], grad_output, saved[1].sym_sizes()));
    }
    if (arguments.has_bias && ctx->needs_input_grad(2)) result[2] = bias_gradient(grad_output);
    return result;
  }
};

// dx = dy *' w
struct ConvDgrad : torch::autograd::Function<ConvDgrad> {
  static Variable forward(AutogradContext* ctx, const Variable& grad_output, const Variable& weight,
                          c10::SymIntArrayRef input_size, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          const c10::SymInt& groups, std::string_view sampling,
                          int64_t workspace_limit) {
    ctx->save_for_backward({grad_output, weight});
    Arguments::save(ctx, stride, padding, dilation, groups, sampling, workspace_limit);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return conv_dgrad_op().call(grad_output, weight, input_size, stride, padding, dilation, groups,
                                sampling, workspace_limit);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Variable& grad_input = grads[0];  // the gradient with respect to dx
    variable_list result(9);
    if (!grad_input.defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Arguments arguments(ctx);
    const BelowAutogradUnlessRecording guard(grads[0]);
    if (ctx->needs_input_grad(0)) result[0] = arguments.fprop(grad_input, saved[1]);
    if (ctx->needs_input_grad(1)) {
      result[1] = arguments.wgrad(saved[0], grad_input, saved[1].sym_sizes());
    }
    return result;
  }
};

// dw = dy *" x
struct ConvWgrad : torch::autograd::Function<ConvWgrad> {
  static Variable forward(AutogradContext* ctx, const Variable& grad_output, const Variable& input,
                          c10::SymIntArrayRef weight_size, c10::SymIntArrayRef stride,
                          c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          const c10::SymInt& groups, std::string_view sampling,
                          int64_t workspace_limit) {
    ctx->save_for_backward({grad_output, input});
    Arguments::save(ctx, stride, padding, dilation, groups, sampling, workspace_limit);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return conv_wgrad_op().call(grad_output, input, weight_size, stride, padding, dilation, groups,
                                sampling, workspace_limit);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Variable& grad_weight = grads[0];  // the gradient with respect to dw
    variable_list result(9);
    if (!grad_weight.defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const Arguments arguments(ctx);
    const BelowAutogradUnlessRecording guard(grads[0]);
    if (ctx->needs_input_grad(0)) result[0] = arguments.fprop(saved[1], grad_weight);
    if (ctx->needs_input_grad(1)) {
      result[1] = arguments.dgrad(saved[0], grad_weight, saved[1].sym_sizes());
    }
    return result;
  }
};

bool needs_aten(const at::Tensor& a, const at::Tensor& b,
                const std::optional<at::Tensor>& c = std::nullopt) {
  if (in_transform()) return true;
  return is_dual(a) || is_dual(b) || (c && is_dual(*c));
}

bool needs_gradient(const at::Tensor& a, const at::Tensor& b,
                    const std::optional<at::Tensor>& c = std::nullopt) {
  return at::GradMode::is_enabled() &&
         (a.requires_grad() || b.requires_grad() || (c && c->defined() && c->requires_grad()));
}

// Whether the output padding is a stride or more, in any dimension. Such a transposed convolution
// is not the gradient of a convolution, and its gradients are none of our operators.
bool has_large_output_padding(c10::SymIntArrayRef output_padding, c10::SymIntArrayRef stride) {
  for (size_t d = 0; d < std::min(output_padding.size(), stride.size()); ++d) {
    if (output_padding[d] >= stride[d]) return true;
  }
  return false;
}

// Whether a 1-d convolution becomes one of images of height 1 here, so that its derivatives are
// those of that one. Lists of a wrong length are ATen's to refuse.
bool takes_height(const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
                  c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation) {
  return weight.dim() == 3 && stride.size() == 1 && dilation.size() == 1 && padding.size() >= 1 &&
         padding.size() <= 2 && has_layout(input) && has_layout(weight) &&
         is_image_of_height_1(input, weight, /*pads=*/padding.size() == 2);
}

at::Tensor conv_fprop_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                               c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                               c10::SymIntArrayRef dilation, c10::SymInt groups,
                               std::string_view sampling, int64_t workspace_limit) {
  if (needs_aten(input, weight, bias)) {
    return aten_fprop(input, weight, bias, stride, padding, dilation, groups);
  }
  if (takes_height(input, weight, stride, padding, dilation)) {
    const OfHeight1<c10::SymInt> images(stride, padding, dilation);
    return conv_fprop_op()
        .call(input.contiguous().unsqueeze(2), weight.unsqueeze(2), bias, images.stride,
              images.padding, images.dilation, groups, sampling, workspace_limit)
        .squeeze(2);
  }
  if (needs_gradient(input, weight, bias)) {
    return ConvFprop::apply(input, weight, bias, stride, padding, dilation, groups, sampling,
                            workspace_limit);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return conv_fprop_op().redispatch(keys & c10::after_autograd_keyset, input, weight, bias, stride,
                                    padding, dilation, std::move(groups), sampling,
                                    workspace_limit);
}

at::Tensor conv_transpose_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                                   const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                   c10::SymIntArrayRef output_padding, c10::SymIntArrayRef dilation,
                                   c10::SymInt groups, std::string_view sampling,
                                   int64_t workspace_limit) {
  if (needs_aten(input, weight, bias)) {
    return aten_transpose(input, weight, bias, stride, padding, output_padding, dilation, groups);
  }
  if (output_padding.size() == 1 && takes_height(input, weight, stride, padding, dilation)) {
    const OfHeight1<c10::SymInt> images(stride, padding, dilation, output_padding);
    return conv_transpose_op()
        .call(input.contiguous().unsqueeze(2), weight.unsqueeze(2), bias, images.stride,
              images.padding, images.output_padding, images.dilation, groups, sampling,
              workspace_limit)
        .squeeze(2);
  }
  if (needs_gradient(input, weight, bias)) {
    if (has_large_output_padding(output_padding, stride)) {
      resolve(sampling, workspace_limit);  // checks them
      // What a compiler traces runs later.
      if (has_layout(input)) {
        count_fallback("arguments that PyTorch refuses, or takes in a way of its own");
      }
      return aten_transpose(input, weight, bias, stride, padding, output_padding, dilation, groups);
    }
    return ConvTranspose::apply(input, weight, bias, stride, padding, output_padding, dilation,
                                groups, sampling, workspace_limit);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return conv_transpose_op().redispatch(keys & c10::after_autograd_keyset, input, weight, bias,
                                        stride, padding, output_padding, dilation,
                                        std::move(groups), sampling, workspace_limit);
}

at::Tensor conv_dgrad_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_output,
                               const at::Tensor& weight, c10::SymIntArrayRef input_size,
                               c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                               c10::SymIntArrayRef dilation, c10::SymInt groups,
                               std::string_view sampling, int64_t workspace_limit) {
  if (needs_aten(grad_output, weight)) {
    return aten_dgrad(grad_output, weight, input_size, stride, padding, dilation, groups);
  }
  if (needs_gradient(grad_output, weight)) {
    return ConvDgrad::apply(grad_output, weight, input_size, stride, padding, dilation, groups,
                            sampling, workspace_limit);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return conv_dgrad_op().redispatch(keys & c10::after_autograd_keyset, grad_output, weight,
                                    input_size, stride, padding, dilation, std::move(groups),
                                    sampling, workspace_limit);
}

at::Tensor conv_wgrad_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_output,
                               const at::Tensor& input, c10::SymIntArrayRef weight_size,
                               c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                               c10::SymIntArrayRef dilation, c10::SymInt groups,
                               std::string_view sampling, int64_t workspace_limit) {
  if (needs_aten(grad_output, input)) {
    return aten_wgrad(grad_output, input, weight_size, stride, padding, dilation, groups);
  }
  if (needs_gradient(grad_output, input)) {
    return ConvWgrad::apply(grad_output, input, weight_size, stride, padding, dilation, groups,
                            sampling, workspace_limit);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return conv_wgrad_op().redispatch(keys & c10::after_autograd_keyset, grad_output, input,
                                    weight_size, stride, padding, dilation, std::move(groups),
                                    sampling, workspace_limit);
}

// Below a gradient that is wanted, the parts run one by one.
at::Tensor conv_fused_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                               const std::optional<at::Tensor>& residual,
                               c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                               c10::SymIntArrayRef dilation, c10::SymInt groups,
                               std::string_view activation, std::string_view sampling,
                               int64_t workspace_limit) {
  const bool of_residual =
      residual && residual->defined() &&
      ((at::GradMode::is_enabled() && residual->requires_grad()) || is_dual(*residual));
  if (of_residual || needs_aten(input, weight, bias) || needs_gradient(input, weight, bias)) {
    const auto convolved = conv_fprop_op().call(input, weight, bias, stride, padding, dilation,
                                                std::move(groups), sampling, workspace_limit);
    return aten_epilogue(convolved, residual, activation_of_call(activation));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return conv_fused_op().redispatch(keys & c10::after_autograd_keyset, input, weight, bias,
                                    residual, stride, padding, dilation, std::move(groups),
                                    activation, sampling, workspace_limit);
}

}  // namespace
}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, Autograd, m) {
  m.impl("conv_fprop", cudnn_autotune::conv_fprop_autograd);
  m.impl("conv_transpose", cudnn_autotune::conv_transpose_autograd);
  m.impl("conv_dgrad", cudnn_autotune::conv_dgrad_autograd);
  m.impl("conv_wgrad", cudnn_autotune::conv_wgrad_autograd);
  m.impl("conv_fused", cudnn_autotune::conv_fused_autograd);
}
