#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/core/SymInt.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <vector>

#include "call/aten_conv.h"
#include "call/autocast.h"
#include "call/call_policy.h"

// In the graphs of torch.compile a convolution that is served is PyTorch's, with a marked input.
// The marks are the identity: compile/inductor.py takes them away again. Programs of other
// compilers run them, and their copies carry the policy.
//
// A convolution that pads one side more than the other has a mark that pads by the difference:
// compile/inductor.py leaves that to the operators, which take both paddings.

TORCH_LIBRARY_FRAGMENT(cudnn_autotune, m) {
  m.def("mark_input(Tensor input, str sampling, int workspace_limit) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  // The padding has the elements before each spatial dimension, then those after each.
  m.def("mark_padded(Tensor input, SymInt[] padding, str sampling, int workspace_limit) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  // Inductor would fold what follows a transposed convolution into its weight, wrongly.
  m.def("mark_output(Tensor output) -> Tensor", {at::Tag::pt2_compliant_tag});
}

namespace cudnn_autotune {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor call_mark_input(const at::Tensor& input, std::string_view sampling,
                           int64_t workspace_limit) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::mark_input", "")
                             .typed<at::Tensor(const at::Tensor&, std::string_view, int64_t)>();
  return op.call(input, sampling, workspace_limit);
}

at::Tensor call_mark_padded(const at::Tensor& input, c10::SymIntArrayRef padding,
                            std::string_view sampling, int64_t workspace_limit) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("cudnn_autotune::mark_padded", "")
          .typed<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, std::string_view, int64_t)>();
  return op.call(input, padding, sampling, workspace_limit);
}

// A padding in the order of constant_pad_nd: the last dimension comes first.
std::vector<c10::SymInt> in_pairs(c10::SymIntArrayRef padding, bool negative = false) {
  const size_t dims = padding.size() / 2;
  std::vector<c10::SymInt> pairs;
  for (size_t d = dims; d-- > 0;) {
    for (const c10::SymInt& size : {padding[d], padding[dims + d]}) {
      pairs.push_back(negative ? -size : size);
    }
  }
  return pairs;
}

at::Tensor pad(const at::Tensor& input, c10::SymIntArrayRef padding) {
  return at::constant_pad_nd_symint(input, in_pairs(padding), 0);
}

at::Tensor call_mark_output(const at::Tensor& output) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cudnn_autotune::mark_output", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(output);
}

// The identity, whose derivative is not marked.
template <size_t arguments>
struct Mark : torch::autograd::Function<Mark<arguments>> {
  template <typename Call>
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& tensor, const Call& call) {
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call(tensor);
  }
  static variable_list backward(AutogradContext*, const variable_list& gradients) {
    variable_list result(2);
    result[0] = gradients[0];
    return result;
  }
};

// A marked, padded copy. The derivative is without the padding.
struct PaddedMark : torch::autograd::Function<PaddedMark> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& input,
                            const std::vector<c10::SymInt>& padding, std::string_view sampling,
                            int64_t workspace_limit) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["padding"] = in_pairs(padding, /*negative=*/true);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_mark_padded(input, padding, sampling, workspace_limit);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    variable_list result(4);
    if (gradients[0].defined()) {
      const auto padding = ctx->saved_data["padding"].toSymIntVector();
      result[0] = at::constant_pad_nd_symint(gradients[0], padding, 0);
    }
    return result;
  }
};

// Transforms and forward-mode derivatives are PyTorch's own: what they trace is not marked.
bool is_dual(const at::Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

at::Tensor mark_input_autograd(const at::Tensor& input, std::string_view sampling,
                               int64_t workspace_limit) {
  if (is_dual(input)) return input;
  return Mark<3>::apply(input, [&](const at::Tensor& tensor) {
    return call_mark_input(tensor, sampling, workspace_limit);
  });
}

at::Tensor mark_padded_autograd(const at::Tensor& input, c10::SymIntArrayRef padding,
                                std::string_view sampling, int64_t workspace_limit) {
  if (is_dual(input)) return pad(input, padding);
  return PaddedMark::apply(input, padding.vec(), sampling, workspace_limit);
}

at::Tensor mark_output_autograd(const at::Tensor& output) {
  if (is_dual(output)) return output;
  return Mark<1>::apply(output, [](const at::Tensor& tensor) { return call_mark_output(tensor); });
}

// The input as autocast will cast it for the convolution: what is cast behind the mark would not be
// marked.
at::Tensor autocasted(const at::Tensor& input) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCUDA), input, at::kCUDA);
}

at::Tensor mark_input_autocast(const at::Tensor& input, std::string_view sampling,
                               int64_t workspace_limit) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return call_mark_input(autocasted(input), sampling, workspace_limit);
}

at::Tensor mark_padded_autocast(const at::Tensor& input, c10::SymIntArrayRef padding,
                                std::string_view sampling, int64_t workspace_limit) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return call_mark_padded(autocasted(input), padding, sampling, workspace_limit);
}

}  // namespace
}  // namespace cudnn_autotune

TORCH_LIBRARY_IMPL(cudnn_autotune, CompositeExplicitAutograd, m) {
  m.impl("mark_input",
         [](const at::Tensor& input, std::string_view sampling, int64_t workspace_limit) {
           return cudnn_autotune::marked(input.clone(), sampling, workspace_limit);
         });
  m.impl("mark_padded", [](const at::Tensor& input, c10::SymIntArrayRef padding,
                           std::string_view sampling, int64_t workspace_limit) {
    return cudnn_autotune::marked(cudnn_autotune::pad(input, padding), sampling, workspace_limit);
  });
  m.impl("mark_output", [](const at::Tensor& output) { return output.clone(); });
}

TORCH_LIBRARY_IMPL(cudnn_autotune, Autograd, m) {
  m.impl("mark_input", cudnn_autotune::mark_input_autograd);
  m.impl("mark_padded", cudnn_autotune::mark_padded_autograd);
  m.impl("mark_output", cudnn_autotune::mark_output_autograd);
}

TORCH_LIBRARY_IMPL(cudnn_autotune, AutocastCUDA, m) {
  m.impl("mark_input", cudnn_autotune::mark_input_autocast);
  m.impl("mark_padded", cudnn_autotune::mark_padded_autocast);
}

TORCH_LIBRARY_IMPL(cudnn_autotune, FuncTorchDynamicLayerFrontMode, m) {
  m.impl("mark_input", [](const at::Tensor& input, std::string_view, int64_t) { return input; });
  m.impl("mark_padded", [](const at::Tensor& input, c10::SymIntArrayRef padding, std::string_view,
                           int64_t) { return cudnn_autotune::pad(input, padding); });
  m.impl("mark_output", [](const at::Tensor& output) { return output; });
}
