#include "norm/norm_choices.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "call/aten_conv.h"
#include "call/call_policy.h"
#include "call/settings.h"

namespace cudnn_autotune {
namespace {

thread_local int guards_of_thread = 0;     // of NormsByKernelsGuard
thread_local NormModule module_of_thread;  // of NormModuleScope

// Never destroyed, because calls may come while the process exits.
class NormChoices {
 public:
  static NormChoices& instance() {
    static auto* choices = new NormChoices();
    return *choices;
  }

  // Whether the kernels compute a call of this signature. Nothing if that was not chosen, or was
  // chosen for a number of calls, which are over.
  std::optional<bool> find(const NormCallSignature& signature) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(signature);
    if (found == known_.end()) return std::nullopt;
    NormVerdict& verdict = found->second;
    const bool is_served = verdict.is_served;
    if (verdict.most_calls > 0 && --verdict.most_calls == 0) known_.erase(found);
    return is_served;
  }
  void set(const NormCallSignature& signature, const NormVerdict& verdict) {
    const std::lock_guard lock(mutex_);
    if (known_.size() >= kMost) known_.clear();  // sizes may keep changing
    known_.insert_or_assign(signature, verdict);
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    known_.clear();
  }

  NormChooser chooser;

 private:
  static constexpr size_t kMost = 1U << 12U;

  std::mutex mutex_;
  std::unordered_map<NormCallSignature, NormVerdict, NormCallSignature::Hash> known_;
};

// The sampling mode that a policy asks for a call; -1 for that of a module. Nothing where PyTorch
// computes the call without being asked.
std::optional<int16_t> sampling_of_norm(const NormCall& call, const NormKind& kind) {
  if (module_of_thread.serial != 0) {
    const bool is_left = OwnPathGuard::is_active() || torch::jit::tracer::isTracing();
    return is_left ? std::nullopt : std::optional<int16_t>(-1);
  }
  const auto policy = policy_of_call(call.input);
  // The batch norms of a converted model's forward ask by themselves, but for instance norms, which
  // are calls of one image.
  if (!policy || !(policy->is_process_wide || kind.groups > 0 || call.input.size(0) == 1)) {
    return std::nullopt;
  }
  return resolve(policy->sampling, -1).sampling;
}

}  // namespace

NormModuleScope::NormModuleScope(const NormModule& module) noexcept
    : former_(std::exchange(module_of_thread, module)) {}
NormModuleScope::~NormModuleScope() { module_of_thread = former_; }

bool is_served(const NormCall& call, const NormKind& kind, c10::function_ref<bool()> suits) {
  if (guards_of_thread > 0) return suits();
  const auto sampling = sampling_of_norm(call, kind);
  if (!sampling || call.input.dim() > kMostNormDims) return false;
  NormChoices& choices = NormChoices::instance();
  const NormModule module = module_of_thread;
  const NormCallSignature signature(call, kind, module.serial, *sampling);
  if (const auto known = choices.find(signature)) return *known && suits();
  if (!suits() || !choices.chooser) return false;
  const OwnPathGuard own_path;
  // A step is measured with its backward, so autograd, which may be off here, has to record it.
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto off = at::GradMode::is_enabled()
                       ? local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView
                       : local.excluded_;
  const c10::impl::ForceDispatchKeyGuard with_autograd(local.included_, off);
  // Without the lock: Python takes the GIL, which another thread may hold that waits for the lock.
  const auto chosen = choices.chooser(
      call, kind, module.object, *sampling < 0 ? std::string_view() : sampling_name(*sampling));
  if (!chosen) return false;
  choices.set(signature, *chosen);
  return chosen->is_served;
}

void set_norm_chooser(NormChooser chooser) { NormChoices::instance().chooser = std::move(chooser); }

void forget_norms() { NormChoices::instance().clear(); }

NormsByKernelsGuard::NormsByKernelsGuard() noexcept { ++guards_of_thread; }
NormsByKernelsGuard::~NormsByKernelsGuard() { --guards_of_thread; }

}  // namespace cudnn_autotune
