#include "call/call_policy.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>

#include "call/aten_conv.h"

namespace cudnn_autotune {
namespace {

using torch::autograd::variable_list;

OperatorPolicy arguments_of(const CallPolicy& policy) {
  return {sampling_name(policy.sampling), policy.workspace_limit};
}

struct Scope {
  int16_t sampling;  // number of a mode; -1 takes the setting
  int64_t workspace_limit;
  // The node that autograd evaluated on this thread when the scope began. If it evaluates another
  // one now, that one began later.
  const torch::autograd::Node* node;
};

thread_local c10::SmallVector<Scope, 8> scopes_of_thread;

// A hook that does nothing but carry a policy. A node has it from its forward.
struct Label : torch::autograd::FunctionPreHook {
  explicit Label(const CallPolicy& policy) : policy(policy) {}
  variable_list operator()(const variable_list& gradients) override { return gradients; }
  // Compiled autograd builds a graph without nodes: the process's policy serves it.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  CallPolicy policy;
};

const Label* label_of(const torch::autograd::Node& node) {
  for (const auto& hook : node.pre_hooks()) {
    if (const auto* label = dynamic_cast<const Label*>(hook.get())) return label;
  }
  return nullptr;
}

// What a marked tensor has in addition.
struct PolicyMark : c10::BackendMeta {
  explicit PolicyMark(const CallPolicy& policy) : policy(policy) {}
  CallPolicy policy;
};

const PolicyMark* mark_of(const at::Tensor& tensor) {
  return dynamic_cast<const PolicyMark*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// That of the process is left out.
std::optional<OperatorPolicy> own_policy(const at::Tensor& input) {
  if (const PolicyMark* mark = mark_of(input)) return arguments_of(mark->policy);
  const auto node = torch::autograd::get_current_node();
  if (!scopes_of_thread.empty() && scopes_of_thread.back().node == node.get()) {
    const Scope& scope = scopes_of_thread.back();
    return OperatorPolicy{scope.sampling < 0 ? std::string_view() : sampling_name(scope.sampling),
                          scope.workspace_limit};
  }
  if (const Label* label = node ? label_of(*node) : nullptr) return arguments_of(label->policy);
  return std::nullopt;
}

// Null: not enabled.
std::atomic<const ProcessWidePolicy*> policy_of_process{nullptr};

bool takes_own_path() {
  // A tracer records what PyTorch's own kernel calls.
  return OwnPathGuard::is_active() || torch::jit::tracer::isTracing();
}

}  // namespace

std::optional<OperatorPolicy> policy_of_call(const at::Tensor& input) {
  if (takes_own_path()) return std::nullopt;
  if (const auto own = own_policy(input)) return own;
  const auto* process = policy_of_process.load(std::memory_order_acquire);
  if (process == nullptr) return std::nullopt;
  return OperatorPolicy{process->sampling, process->workspace_limit, /*is_process_wide=*/true};
}

PolicyScope::PolicyScope(std::string_view sampling, int64_t workspace_limit) {
  enter(sampling, workspace_limit);
}

void PolicyScope::enter(std::string_view sampling, int64_t workspace_limit) {
  const CallPolicy policy = resolve(sampling, workspace_limit);
  const auto node = torch::autograd::get_current_node();
  scopes_of_thread.push_back(
      {sampling.empty() ? int16_t{-1} : policy.sampling, workspace_limit, node.get()});
}

void PolicyScope::leave() { scopes_of_thread.pop_back(); }

void label_derivative(const at::Tensor& input, const at::Tensor& output) {
  const auto& node = output.grad_fn();
  if (node == nullptr || takes_own_path() || label_of(*node) != nullptr) return;
  if (const auto own = own_policy(input)) {
    // The settings may have changed when the derivative is computed.
    node->add_pre_hook(std::make_unique<Label>(resolve(own->sampling, own->workspace_limit)));
  }
}

at::Tensor marked(at::Tensor copy, std::string_view sampling, int64_t workspace_limit) {
  copy.unsafeGetTensorImpl()->set_backend_meta(
      c10::make_intrusive<PolicyMark>(resolve(sampling, workspace_limit)));
  return copy;
}

std::optional<ProcessWidePolicy> process_wide() {
  const auto* policy = policy_of_process.load(std::memory_order_acquire);
  return policy != nullptr ? std::optional(*policy) : std::nullopt;
}

std::optional<ProcessWidePolicy> exchange_process_wide(
    const std::optional<ProcessWidePolicy>& policy) {
  static std::mutex mutex;
  // Each policy is kept for good, because a call on another thread may still read it.
  static auto* const policies = new std::deque<ProcessWidePolicy>;
  const std::lock_guard lock(mutex);
  const ProcessWidePolicy* next = nullptr;
  if (policy) {
    const auto same = std::find_if(policies->begin(), policies->end(), [&](const auto& known) {
      return known.sampling == policy->sampling && known.workspace_limit == policy->workspace_limit;
    });
    next = same != policies->end() ? &*same : &policies->emplace_back(*policy);
  }
  const auto* former = policy_of_process.exchange(next, std::memory_order_acq_rel);
  return former != nullptr ? std::optional(*former) : std::nullopt;
}

}  // namespace cudnn_autotune
