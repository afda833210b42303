#include "group_norm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/native_group_norm_cpu_dispatch.h>
#include <ATen/ops/native_group_norm_cuda_dispatch.h>
#include <c10/util/hash.h>
#include <torch/library.h>

#include <mutex>
#include <tuple>
#include <unordered_map>
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

// What a choice depends on. The address counts as far as whole vectors can be read there.
struct GroupNormKey {
  c10::DeviceIndex device;
  at::ScalarType dtype;
  int64_t images, channels, spatial, groups;
  bool has_weight, has_bias;
  uintptr_t misalignment;
  int16_t sampling;

  auto fields() const {
    return std::tie(device, dtype, images, channels, spatial, groups, has_weight, has_bias,
                    misalignment, sampling);
  }
  bool operator==(const GroupNormKey& other) const { return fields() == other.fields(); }
};

struct GroupNormKeyHash {
  size_t operator()(const GroupNormKey& key) const {
    return c10::get_hash(key.images, key.channels, key.spatial, key.groups, key.sampling);
  }
};

// Never destroyed, because calls may come while the process exits.
struct GroupNormChoices {
  std::mutex mutex;
  std::unordered_map<GroupNormKey, bool, GroupNormKeyHash> is_served;
  GroupNormChooser chooser;

  static GroupNormChoices& instance() {
    static auto* choices = new GroupNormChoices();
    return *choices;
  }
};

// Whether the kernels may take a call: it is right, and nothing about it is odd. Autograd and
// autocast have had their turn.
bool suits_group_norm(const at::Tensor& input, const OptionalTensor& weight,
                      const OptionalTensor& bias, int64_t images, int64_t channels, int64_t spatial,
                      int64_t groups) {
  const auto dtype = input.scalar_type();
  const auto is_parameter = [&](const OptionalTensor& values) {
    return !is_given(values) ||
           (values->dim() == 1 && values->size(0) == channels && values->is_contiguous() &&
            values->scalar_type() == dtype && values->device() == input.device());
  };
  return (dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat) &&
         input.layout() == at::kStrided && input.is_contiguous() && input.numel() > 0 &&
         input.dim() >= 2 && input.size(0) == images && input.size(1) == channels &&
         input.numel() == images * channels * spatial && groups > 0 && channels % groups == 0 &&
         is_parameter(weight) && is_parameter(bias);
}

// Whether the kernels compute calls like this one; nothing if that is not known and cannot be
// chosen now.
bool is_served(const GroupNormKey& key, const at::Tensor& input, const OptionalTensor& weight,
               const OptionalTensor& bias, double eps, std::string_view sampling) {
  GroupNormChoices& choices = GroupNormChoices::instance();
  {
    const std::lock_guard lock(choices.mutex);
    const auto found = choices.is_served.find(key);
    if (found != choices.is_served.end()) return found->second;
  }
  if (!choices.chooser) return false;
  // Without the lock: Python takes the GIL, which another thread may hold that waits for the lock.
  const PyTorchsOwnGuard pytorchs_own;
  const auto chosen = choices.chooser(input, weight, bias, key.groups, eps, sampling);
  if (!chosen) return false;
  const std::lock_guard lock(choices.mutex);
  return choices.is_served.insert_or_assign(key, *chosen).first->second;
}

}  // namespace

GroupNormResults native_group_norm(c10::DispatchKeySet keys, const at::Tensor& input,
                                   const OptionalTensor& weight, const OptionalTensor& bias,
                                   int64_t images, int64_t channels, int64_t spatial,
                                   int64_t groups, double eps) {
  const auto pytorchs = [&] {
    const auto kernel = input.is_cuda() ? at::cuda::native_group_norm : at::cpu::native_group_norm;
    return kernel(input, weight, bias, images, channels, spatial, groups, eps);
  };
  const auto policy = policy_of_call(input);
  if (!policy || !suits_group_norm(input, weight, bias, images, channels, spatial, groups)) {
    return pytorchs();
  }
  const CallPolicy resolved = resolve(policy->sampling, policy->workspace_limit);
  const GroupNormKey key{input.device().index(),
                         input.scalar_type(),
                         images,
                         channels,
                         spatial,
                         groups,
                         is_given(weight),
                         is_given(bias),
                         reinterpret_cast<uintptr_t>(input.const_data_ptr()) % 16,
                         resolved.sampling};
  try {
    if (is_served(key, input, weight, bias, eps, sampling_name(resolved.sampling))) {
      auto [output, statistics] =
          group_norm_op().redispatch(keys, input, weight, bias, groups, eps);
      statistics = statistics.to(input.scalar_type());
      return {output, statistics.select(0, 0), statistics.select(0, 1)};
    }
  } catch (const PlanError&) {  // PyTorch's kernel is always there
  }
  return pytorchs();
}

void set_group_norm_chooser(GroupNormChooser chooser) {
  GroupNormChoices::instance().chooser = std::move(chooser);
}

void forget_group_norms() {
  GroupNormChoices& choices = GroupNormChoices::instance();
  const std::lock_guard lock(choices.mutex);
  choices.is_served.clear();
}

}  // namespace cudnn_autotune

TORCH_LIBRARY_FRAGMENT(cudnn_autotune, m) {
  m.def(
      "group_norm(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps) -> "
      "(Tensor, Tensor)");
}
