#include "call/settings.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

namespace cudnn_autotune {
namespace {

constexpr size_t kMostNames = 100;

// Names are only ever appended, so that those below `names_size` can be read without the lock.
std::mutex names_mutex;
std::array<std::string, kMostNames> names;
std::atomic<int16_t> names_size{0};

std::atomic<int16_t> default_sampling{0};
std::atomic<int64_t> default_workspace_limit{-1};
std::atomic<int32_t> default_benchmark_limit{0};

int16_t find_name(std::string_view name) {
  const int16_t size = names_size.load(std::memory_order_acquire);
  for (int16_t id = 0; id < size; ++id) {
    if (names[id] == name) return id;
  }
  return -1;
}

// PyTorch itself never sets debug info of this kind.
const auto kProbeKind = c10::DebugInfoKind::PRODUCER_INFO;

struct Probe : c10::DebugInfoBase {
  Probe(int32_t number, std::shared_ptr<ProbedCalls> calls)
      : number(number), calls(std::move(calls)) {}
  int32_t number;
  std::shared_ptr<ProbedCalls> calls;
};

const Probe* probe_of_call() {
  return dynamic_cast<const Probe*>(c10::ThreadLocalDebugInfo::get(kProbeKind));
}

std::string allowed() {
  std::string list;
  for (const auto& name : sampling_names()) list += (list.empty() ? "'" : ", '") + name + "'";
  return list;
}

}  // namespace

int16_t register_sampling(const std::string& name) {
  const std::lock_guard lock(names_mutex);
  const int16_t known = find_name(name);
  if (known >= 0) return known;
  const int16_t id = names_size.load(std::memory_order_relaxed);
  TORCH_CHECK_VALUE(id < static_cast<int16_t>(kMostNames), "sampling: more than ", kMostNames,
                    " modes are registered");
  names[id] = name;
  names_size.store(static_cast<int16_t>(id + 1), std::memory_order_release);
  return id;
}

std::vector<std::string> sampling_names() {
  return {names.begin(), names.begin() + names_size.load(std::memory_order_acquire)};
}

const std::string& sampling_name(int16_t id) {
  TORCH_INTERNAL_ASSERT(id >= 0 && id < names_size.load(std::memory_order_acquire));
  return names[id];
}

Settings settings() { return {default_sampling, default_workspace_limit, default_benchmark_limit}; }

void set_sampling(int16_t id) { default_sampling = id; }

void set_workspace_limit(int64_t bytes) { default_workspace_limit = bytes; }

void set_benchmark_limit(int32_t candidates) { default_benchmark_limit = candidates; }

CallPolicy resolve(std::string_view sampling, int64_t workspace_limit) {
  CallPolicy policy{default_sampling.load(std::memory_order_relaxed), workspace_limit};
  if (!sampling.empty()) {
    policy.sampling = find_name(sampling);
    TORCH_CHECK_VALUE(policy.sampling >= 0, "sampling must be one of ", allowed(), ", got '",
                      sampling, "'");
  }
  TORCH_CHECK_VALUE(workspace_limit >= -1,
                    "workspace_limit must be a number of bytes of 0 or more, got ",
                    workspace_limit);
  if (workspace_limit < 0) {
    policy.workspace_limit = default_workspace_limit.load(std::memory_order_relaxed);
  }
  return policy;
}

ProbeGuard::ProbeGuard(int32_t number, std::shared_ptr<ProbedCalls> calls)
    : guard_(kProbeKind, std::make_shared<Probe>(number, std::move(calls))) {
  TORCH_CHECK_VALUE(number < 0, "number must be below 0, got ", number);
}

int32_t benchmark_limit_of_call() {
  const Probe* probe = probe_of_call();
  if (C10_UNLIKELY(probe != nullptr)) return probe->number;
  return default_benchmark_limit.load(std::memory_order_relaxed);
}

void count_probed_call(const std::string& problem_key) {
  const Probe* probe = probe_of_call();
  if (probe == nullptr) return;
  const std::lock_guard lock(probe->calls->mutex);
  ++probe->calls->counts[problem_key];
}

}  // namespace cudnn_autotune
