#include "aten_norms.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cudnn_batch_norm_backward_cuda_dispatch.h>
#include <ATen/ops/cudnn_batch_norm_cuda_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_batch_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm_backward_cuda_dispatch.h>
#include <ATen/ops/native_batch_norm_cpu_dispatch.h>
#include <ATen/ops/native_batch_norm_cuda_dispatch.h>
#include <ATen/ops/native_group_norm_cpu_dispatch.h>
#include <ATen/ops/native_group_norm_cuda_dispatch.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <mutex>
#include <tuple>
#include <utility>

#include "aten_conv.h"
#include "call_policy.h"
#include "core/check.h"

namespace cudnn_autotune {
namespace {

// The kernels, whatever was chosen.
const c10::TypedOperatorHandle<GroupNormSignature>& group_norm_op() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("cudnn_autotune::group_norm", "")
                                 .typed<GroupNormSignature>();
  return handle;
}

// Never destroyed, because calls may come while the process exits.
struct AtenNormChoices {
  static constexpr size_t kMost = 1U << 12U;

  std::mutex mutex;
  NormVerdicts verdicts{kMost};
  NormChooser chooser;

  static AtenNormChoices& instance() {
    static auto* choices = new AtenNormChoices();
    return *choices;
  }
};

thread_local int norm_guards_of_thread = 0;  // of NormsByKernelsGuard

// The policy that a norm's call is served by, if it has one.
std::optional<OperatorPolicy> policy_of_norm(const at::Tensor& input) {
  if (norm_guards_of_thread > 0) return OperatorPolicy{"", -1, /*is_process_wide=*/true};
  return policy_of_call(input);
}

// Whether the kernels compute calls like this one, as far as that is known or can be chosen now.
bool is_served(const NormCall& call, int64_t groups, bool by_cudnn, const OperatorPolicy& policy) {
  if (norm_guards_of_thread > 0) return true;
  AtenNormChoices& choices = AtenNormChoices::instance();
  const CallPolicy resolved = resolve(policy.sampling, policy.workspace_limit);
  NormCallSignature key(call, "", /*by_gradients=*/groups == 0);
  const std::array<int64_t, 3> more{groups, static_cast<int64_t>(by_cudnn), resolved.sampling};
  key.numbers.append(more.begin(), more.end());
  {
    const std::lock_guard lock(choices.mutex);
    if (const auto known = choices.verdicts.find(key)) return *known;
  }
  if (!choices.chooser) return false;
  const PyTorchsOwnGuard pytorchs_own;
  // A step is measured with its backward, so autograd, which is below here off, has to record it.
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto off = at::GradMode::is_enabled()
                       ? local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView
                       : local.excluded_;
  const c10::impl::ForceDispatchKeyGuard with_autograd(local.included_, off);
  // Without the lock: Python takes the GIL, which another thread may hold that waits for the lock.
  const auto chosen = choices.chooser(call, groups, sampling_name(resolved.sampling));
  if (!chosen) return false;
  const std::lock_guard lock(choices.mutex);
  choices.verdicts.set(std::move(key), *chosen);
  return chosen->is_served;
}

// Whether the kernels may take a group norm: it is right, and nothing about it is odd. Autograd and
// autocast have had their turn.
bool suits_group_norm(const at::Tensor& input, const OptionalTensor& weight,
                      const OptionalTensor& bias, int64_t images, int64_t channels, int64_t spatial,
                      int64_t groups) {
  const auto suits_as_parameter = [&](const OptionalTensor& values) {
    return is_channel_vector(values, input) &&
           (!is_given(values) || values->scalar_type() == input.scalar_type());
  };
  return has_norm_dtype(input) && input.layout() == at::kStrided && input.is_contiguous() &&
         input.numel() > 0 && input.dim() >= 2 && input.size(0) == images &&
         input.size(1) == channels && input.numel() == images * channels * spatial && groups > 0 &&
         channels % groups == 0 && suits_as_parameter(weight) && suits_as_parameter(bias);
}

// The output, the mean and the inverse standard deviation by the kernels, if they were chosen for
// calls like this one. In the forward of a model that was converted, batch norms are served, or
// left to PyTorch, by their modules; instance norms, which have one image here, are served here.
std::optional<ThreeTensors> batch_norm_by_kernels(c10::DispatchKeySet keys, const at::Tensor& input,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias,
                                                  const OptionalTensor& running_mean,
                                                  const OptionalTensor& running_var,
                                                  double momentum, double eps, bool by_cudnn) {
  const auto policy = policy_of_norm(input);
  if (!policy) return std::nullopt;
  const NormCall call{input,        weight, bias,     running_mean, running_var,
                      std::nullopt, true,   momentum, eps};
  if (!suits_operator(call) || is_given(weight) != is_given(bias) ||
      !(policy->is_process_wide || input.size(0) == 1)) {
    return std::nullopt;
  }
  try {
    if (!is_served(call, /*groups=*/0, by_cudnn, *policy)) return std::nullopt;
    if (const auto found = norm_by_kernels(call, std::nullopt, "identity")) {
      return ThreeTensors{found->output, found->mean, found->inv_std};
    }
    const auto [output, mean, inv_std, unbiased_var, mask] =
        norm_op().redispatch(keys, input, weight, bias, std::nullopt, "identity", eps);
    update_running(call, mean, unbiased_var);
    return ThreeTensors{output, mean, inv_std};
  } catch (const PlanError&) {  // PyTorch's kernel is always there
    return std::nullopt;
  }
}

// The gradients by the kernels, of a norm that they computed, if they can.
std::optional<ThreeTensors> gradients_by_kernels(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& input,
    const OptionalTensor& weight, const OptionalTensor& mean, const OptionalTensor& inv_std,
    std::array<bool, 3> output_mask) {
  if (!is_given(mean) || !is_given(inv_std) || grad_output.sizes() != input.sizes() ||
      grad_output.scalar_type() != input.scalar_type() || grad_output.device() != input.device() ||
      !has_plain_strides(input) || (!is_given(weight) && (output_mask[1] || output_mask[2]))) {
    return std::nullopt;
  }
  try {
    const auto [of_input, of_weight, of_bias, of_residual] = norm_backward_op().redispatch(
        keys, grad_output, std::nullopt, input, std::nullopt, weight, std::nullopt, std::nullopt,
        *mean, *inv_std, "identity", {output_mask[0], output_mask[1], output_mask[2], false});
    return ThreeTensors{of_input, of_weight, of_bias};
  } catch (const PlanError&) {
    return std::nullopt;
  }
}

// cuDNN's kernels read whole vectors. Where an address is no multiple of one's size, they end the
// process: they are given a copy. PyTorch's own kernels read such tensors as they are.
at::Tensor aligned(const at::Tensor& tensor) {
  constexpr uintptr_t kVectorBytes = 16;
  const bool is_aligned =
      !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
  return is_aligned ? tensor : tensor.clone(at::MemoryFormat::Preserve);
}

auto* pytorchs_gradients(const at::Tensor& input) {
  return input.is_cuda() ? at::cuda::native_batch_norm_backward
                         : at::cpu::native_batch_norm_backward;
}

// The mark of a mean that the kernels computed. The backward of a mean without it is PyTorch's.
struct OfKernels : c10::BackendMeta {};

bool is_of_kernels(const OptionalTensor& mean) {
  return is_given(mean) &&
         dynamic_cast<const OfKernels*>(mean->unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

}  // namespace

ThreeTensors native_group_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               int64_t images, int64_t channels, int64_t spatial, int64_t groups,
                               double eps) {
  const auto pytorchs = [&] {
    const auto kernel = input.is_cuda() ? at::cuda::native_group_norm : at::cpu::native_group_norm;
    return kernel(input, weight, bias, images, channels, spatial, groups, eps);
  };
  const auto policy = policy_of_norm(input);
  if (!policy || !suits_group_norm(input, weight, bias, images, channels, spatial, groups)) {
    return pytorchs();
  }
  NormCall call{input, weight, bias};
  call.eps = eps;
  try {
    if (is_served(call, groups, /*by_cudnn=*/false, *policy)) {
      auto [output, statistics] =
          group_norm_op().redispatch(keys, input, weight, bias, groups, eps);
      statistics = statistics.to(input.scalar_type());
      return {output, statistics.select(0, 0), statistics.select(0, 1)};
    }
  } catch (const PlanError&) {  // PyTorch's kernel is always there
  }
  return pytorchs();
}

ThreeTensors native_batch_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& running_mean,
                               const OptionalTensor& running_var, bool training, double momentum,
                               double eps) {
  if (training) {
    auto found = batch_norm_by_kernels(keys, input, weight, bias, running_mean, running_var,
                                       momentum, eps, /*by_cudnn=*/false);
    if (found) {
      // Never destroyed, because calls may come while the process exits.
      static const auto* const mark =
          new c10::intrusive_ptr<c10::BackendMeta>(c10::make_intrusive<OfKernels>());
      std::get<1>(*found).unsafeGetTensorImpl()->set_backend_meta(*mark);
      return *std::move(found);
    }
  }
  const auto kernel = input.is_cuda() ? at::cuda::native_batch_norm : at::cpu::native_batch_norm;
  return kernel(input, weight, bias, running_mean, running_var, training, momentum, eps);
}

FourTensors cudnn_batch_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                             const at::Tensor& weight, const OptionalTensor& bias,
                             const OptionalTensor& running_mean, const OptionalTensor& running_var,
                             bool training, double momentum, double eps) {
  if (training) {
    auto found = batch_norm_by_kernels(keys, input, weight, bias, running_mean, running_var,
                                       momentum, eps, /*by_cudnn=*/true);
    if (found) {
      auto& [output, mean, inv_std] = *found;
      return {output, mean, inv_std, at::empty({0}, mean.options())};
    }
  }
  return at::cuda::cudnn_batch_norm(aligned(input), weight, bias, running_mean, running_var,
                                    training, momentum, eps);
}

ThreeTensors native_batch_norm_backward(c10::DispatchKeySet keys, const at::Tensor& grad_output,
                                        const at::Tensor& input, const OptionalTensor& weight,
                                        const OptionalTensor& running_mean,
                                        const OptionalTensor& running_var,
                                        const OptionalTensor& mean, const OptionalTensor& inv_std,
                                        bool training, double eps,
                                        std::array<bool, 3> output_mask) {
  if (training && is_of_kernels(mean)) {
    auto found = gradients_by_kernels(keys, grad_output, input, weight, mean, inv_std, output_mask);
    if (found) return *std::move(found);
  }
  return pytorchs_gradients(input)(grad_output, input, weight, running_mean, running_var, mean,
                                   inv_std, training, eps, output_mask);
}

ThreeTensors cudnn_batch_norm_backward(c10::DispatchKeySet keys, const at::Tensor& input,
                                       const at::Tensor& grad_output, const at::Tensor& weight,
                                       const OptionalTensor& running_mean,
                                       const OptionalTensor& running_var,
                                       const OptionalTensor& mean, const OptionalTensor& inv_std,
                                       double eps, const at::Tensor& reserve) {
  if (reserve.scalar_type() == at::kByte) {
    return at::cuda::cudnn_batch_norm_backward(aligned(input), aligned(grad_output), weight,
                                               running_mean, running_var, mean, inv_std, eps,
                                               reserve);
  }
  constexpr std::array<bool, 3> kAll{true, true, true};
  auto found = gradients_by_kernels(keys, grad_output, input, weight, mean, inv_std, kAll);
  if (found) return *std::move(found);
  // That of PyTorch which needs no reserve space.
  return pytorchs_gradients(input)(grad_output, input, weight, running_mean, running_var, mean,
                                   inv_std, /*train=*/true, eps, kAll);
}

void set_norm_chooser(NormChooser chooser) {
  AtenNormChoices::instance().chooser = std::move(chooser);
}

void forget_aten_norms() {
  AtenNormChoices& choices = AtenNormChoices::instance();
  const std::lock_guard lock(choices.mutex);
  choices.verdicts.clear();
}

NormsByKernelsGuard::NormsByKernelsGuard() noexcept { ++norm_guards_of_thread; }
NormsByKernelsGuard::~NormsByKernelsGuard() { --norm_guards_of_thread; }

}  // namespace cudnn_autotune

TORCH_LIBRARY_FRAGMENT(cudnn_autotune, m) {
  m.def(
      "group_norm(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps) -> "
      "(Tensor, Tensor)");
}
