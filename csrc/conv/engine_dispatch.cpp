#include "conv/engine_dispatch.h"

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "call/aten_conv.h"
#include "call/fallback_counts.h"
#include "call/settings.h"
#include "call/torch_bridge.h"
#include "conv/online_trial.h"
#include "core/choices/choice_table.h"
#include "core/cuda/cuda_driver.h"
#include "core/cuda/graph_lifetime.h"
#include "core/problem/check.h"
#include "plan/build_plan.h"

namespace cudnn_autotune {
namespace {

MissHandler& miss_handler() {
  static MissHandler handler;
  return handler;
}

CaptureMissHandler& capture_miss_handler() {
  static CaptureMissHandler handler;
  return handler;
}

// An entry for what was already chosen in this process. nullopt if nothing was chosen, or if the
// chosen plan no longer builds; that choice is then removed.
std::optional<CacheEntry> remembered(const ChoiceKey& key) {
  auto& table = ChoiceTable::instance();
  const auto [text, version] = table.find(key);
  if (!text) return std::nullopt;
  try {
    return CacheEntry{key, version, {build_plan(key.problem, *text, key.policy.device)}};
  } catch (const PlanError&) {
    count_fallback("a remembered choice no longer builds: tuned again");
    table.erase(key, *text);
    return std::nullopt;
  }
}

// Calls after which a provisional choice is looked at again. They double each time: while the lack
// stays, looking costs ever less.
constexpr int64_t kFirstCalls = 16;
constexpr int64_t kMostCalls = int64_t{1} << 40;

// Makes a provisional entry serve a number of calls.
void serve_for(CacheEntry& entry, int64_t calls) {
  entry.is_provisional = true;
  entry.calls = entry.calls_left = std::min(calls, kMostCalls);
}

// Whether the entry is provisional and has served all its calls. While a stream is captured nothing
// may be timed, so it goes on.
bool is_due(CacheEntry& entry) {
  if (!entry.is_provisional) return false;
  if (entry.calls_left > 0) {
    --entry.calls_left;
    return false;
  }
  return !is_capturing();
}

// An entry for a problem whose first call is captured. An output cannot be checked now. The next
// call outside of a capture is a miss, in which it is chosen properly and checked.
CacheEntry for_capture(const ChoiceKey& key) {
  const ChoiceVersion version = ChoiceTable::instance().find(key).version;
  return {key, version, {capture_miss_handler()(key)}, /*is_provisional=*/true};
}

// `due` is the provisional entry of the key that has served its calls, or null.
CacheEntry miss(const ChoiceKey& key, c10::function_ref<const Operands&()> operands,
                const CacheEntry* due) {
  auto& table = ChoiceTable::instance();
  // The tuning mutex is locked before the GIL is taken. A thread that waited for the mutex with the
  // GIL would block the one that tunes.
  const WithoutGil without_gil;
  if (auto entry = remembered(key)) return *std::move(entry);
  if (is_capturing()) return for_capture(key);
  const bool was_searched = due != nullptr && due->calls > 0;
  std::unique_lock tuning(table.tuning_mutex(), std::defer_lock);
  // What serves already does not wait for another thread's search.
  if (was_searched && !tuning.try_lock()) {
    CacheEntry same = *due;
    serve_for(same, due->calls);
    return same;
  }
  const Operands& tensors = operands();
  if (!tuning.owns_lock()) tuning.lock();
  // Another thread may have tuned it while this one waited.
  if (auto entry = remembered(key)) return *std::move(entry);
  const ChoiceVersion asked = table.find(key).version;
  TuneResult result = [&] {
    // In a backward, autocast may be active: it would cast what is measured and compared.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    // A convolution that a handler makes must not be tuned: it would wait for this one's mutex.
    const OwnPathGuard own_path;
    return miss_handler()(key, tensors, was_searched ? due->path.plan : nullptr);
  }();
  CacheEntry entry{key, asked, {}};
  // What a trial chooses is recorded when it ends. If the problem was forgotten during the search,
  // the version is not current: this call uses the entry, and the next one is a miss again.
  if (result.trial != nullptr) {
    entry.path.trial = std::move(result.trial);
  } else if (result.is_provisional) {
    // The table has final choices only. Other threads ask the handler, too, which remembers it.
    entry.path.plan = std::move(result.plan);
    serve_for(entry, was_searched ? 2 * due->calls : kFirstCalls);
  } else {
    entry.version = table.put_unless_forgotten(key, result.plan->text(), asked);
    entry.path.plan = std::move(result.plan);
  }
  tuning.unlock();
  if (result.after_unlock) result.after_unlock();
  return entry;
}

// As miss(), and memory that is short does not end a call that a provisional entry can serve.
CacheEntry missed(const ChoiceKey& key, c10::function_ref<const Operands&()> operands,
                  const CacheEntry* due) {
  if (due == nullptr || due->calls == 0) return miss(key, operands, due);
  // A copy, because a handler that runs convolutions changes the cache.
  CacheEntry same = *due;
  try {
    return miss(key, operands, &same);
  } catch (const c10::OutOfMemoryError&) {
    serve_for(same, 2 * same.calls);
    return same;
  }
}

// Calls of a trial, of which one looks whether another thread has decided the same problem.
constexpr int64_t kLookEvery = 64;

// Replaces the trial of an entry by the choice, if it is decided, here or by another thread.
void end_trial_if_decided(CacheEntry& entry) {
  auto& table = ChoiceTable::instance();
  const OnlineTrial& trial = *entry.path.trial;
  auto winner = trial.decided();
  if (winner == nullptr) {
    if (trial.schedule()->calls() % kLookEvery != kLookEvery - 1) return;
    const RelaxedCapture relaxed;
    if (auto other = remembered(entry.key)) entry = *std::move(other);
    return;
  }
  const RelaxedCapture relaxed;  // what the trial held is freed
  if (trial.schedule()->is_provisional()) {
    entry.path = ChosenPath{std::move(winner)};
    serve_for(entry, kFirstCalls);
    return;
  }
  auto chosen = table.find(entry.key).text;
  if (chosen && *chosen != winner->text()) {
    // Another thread has decided first: all threads use one choice.
    if (auto other = remembered(entry.key)) {
      entry = *std::move(other);
      return;
    }
    chosen.reset();
  }
  if (!chosen) entry.version = table.put_unless_forgotten(entry.key, winner->text(), entry.version);
  entry.path = ChosenPath{std::move(winner)};  // this destroys the trial
}

// The key of the same problem without any workspace, for when memory is short.
ChoiceKey without_workspace(const ChoiceKey& key) {
  ChoiceKey other = key;
  other.policy.sampling = register_sampling("heuristic");
  other.policy.workspace_limit = 0;
  return other;
}

// A range in PyTorch's profiler with the name of what runs. Costs nothing when no profiler runs.
class ProfilerRange {
 public:
  explicit ProfilerRange(const ChosenPath& path) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (C10_LIKELY(!callbacks.has_value())) return;
    range_.emplace(std::move(*callbacks));
    range_->before("cudnn_autotune::" + (path.trial ? "online" : path.plan->text()));
  }

 private:
  std::optional<at::RecordFunction> range_;
};

}  // namespace

void set_miss_handler(MissHandler handler) { miss_handler() = std::move(handler); }
void set_capture_miss_handler(CaptureMissHandler handler) {
  capture_miss_handler() = std::move(handler);
}

ChosenPath lookup(const ChoiceKey& key, c10::function_ref<const Operands&()> operands) {
  if (C10_UNLIKELY(key.policy.benchmark_limit < 0)) {
    const auto* bytes = reinterpret_cast<const char*>(&key.problem);
    count_probed_call(std::string(bytes, sizeof(key.problem)));
  }
  auto& cache = PlanCache::of_this_thread();
  CacheEntry* entry = cache.find(key);
  if (entry == nullptr || is_due(*entry)) {
    const RelaxedCapture relaxed;  // the cache drops plans, which unload kernels
    entry = &cache.put(missed(key, operands, entry));
  }
  if (entry->path.trial != nullptr) end_trial_if_decided(*entry);
  if (entry->path.trial != nullptr) {
    if (auto first = entry->path.trial->before_first_step()) return {std::move(first)};
  }
  return entry->path;
}

bool allocates_result(const ChosenPath& path) {
  return path.plan != nullptr && path.plan->allocates_result();
}

bool run(const ChosenPath& path, const ChoiceKey& key, const Operands& operands) {
  const ProfilerRange range(path);
  try {
    if (path.trial != nullptr) {
      path.trial->run(operands);
    } else {
      const bool captures = is_capturing();
      if (captures) keep_for_graph(c10::cuda::getCurrentCUDAStream().stream(), path.plan);
      execute(*path.plan, operands, captures);
    }
    return true;
  } catch (const c10::OutOfMemoryError&) {
    count_fallback("there was no memory to run what was chosen");
    if (key.policy.workspace_limit == 0) return false;
  }
  const ChoiceKey other = without_workspace(key);
  const ChosenPath smaller = lookup(other, [&]() -> const Operands& { return operands; });
  return !allocates_result(smaller) && run(smaller, other, operands);
}

}  // namespace cudnn_autotune
