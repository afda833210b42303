#include "engine_dispatch.h"

#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "captured_plans.h"
#include "core/check.h"
#include "core/choice_table.h"
#include "core/engine_search.h"
#include "core/plan_cache.h"
#include "fallback_counts.h"
#include "non_cudnn_paths.h"
#include "online_trial.h"
#include "settings.h"
#include "torch_bridge.h"

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

// Throws CudnnError where the text names nothing that builds.
CachedPlan build(const ChoiceKey& key, const std::string& text, const ChoiceVersion& version) {
  CachedPlan plan{key, version};
  plan.is_matmul = text == kMatmul && is_matmul(key.problem);
  if (text != kAten && !plan.is_matmul) {
    plan.plan = EngineSearch(key.problem, current_handle()).build(text);
  }
  return plan;
}

// The first config of the heuristics that builds; null where there is none.
std::shared_ptr<ConvPlan> heuristic_plan(const ChoiceKey& key) {
  EngineSearch search(key.problem, current_handle());
  for (const char* mode : {"A", "FALLBACK"}) {
    for (const auto& candidate : search.query(mode)) {
      if (!is_allowed(candidate, key.problem, key.policy.workspace_limit)) continue;
      try {
        return search.build(candidate.config);
      } catch (const CudnnError&) {
        // The next one.
      }
    }
  }
  return nullptr;
}

// The remembered choice, as a plan of this thread; nullopt where there is none, or where its
// config no longer builds: it is then forgotten.
std::optional<CachedPlan> remembered(const ChoiceKey& key) {
  auto& table = ChoiceTable::instance();
  const auto [text, version] = table.find(key);
  if (!text) return std::nullopt;
  try {
    return build(key, *text, version);
  } catch (const CudnnError&) {
    count_fallback("a remembered choice no longer builds: tuned again");
    table.erase(key, *text);
    return std::nullopt;
  }
}

// What serves a problem that is first met while a stream is being captured: what an earlier process
// or a pin says of it, else the heuristics' plan. Its output cannot be checked now: it is served
// properly, and checked, at the next call outside.
CachedPlan provisional_plan(const ChoiceKey& key) {
  // To build allocates and loads, which would break the capture.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  CachedPlan plan{key, ChoiceTable::instance().find(key).version};
  // Padding that differs before and after needs a check of the output, which waits for the GPU.
  const bool needs_check = key.problem.pre_padding != key.problem.post_padding;
  if (auto known = capture_miss_handler()(key)) {
    plan.plan = std::move(known->plan);
    plan.is_matmul = known->text == kMatmul;
  } else if (!needs_check) {
    plan.plan = heuristic_plan(key);
  }
  plan.provisional = true;
  return plan;
}

CachedPlan& miss(const TuneRequest& request) {
  auto& table = ChoiceTable::instance();
  auto& cache = PlanCache::of_this_thread();
  const ChoiceKey& key = request.key;
  // The order of locks is: tuning mutex, then GIL. A thread that waits here with the GIL would
  // stop the one that tunes.
  const WithoutGil without_gil;
  if (auto plan = remembered(key)) return cache.put(*std::move(plan));
  if (is_capturing()) return cache.put(provisional_plan(key));
  std::unique_lock tuning(table.tuning_mutex());
  if (auto plan = remembered(key)) return cache.put(*std::move(plan));
  const ChoiceVersion asked = table.find(key).version;
  TuneResult result = [&] {
    // A backward may run under autocast, which would recast what is measured and compared.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return miss_handler()(request);
  }();
  CachedPlan plan{key, asked, std::move(result.plan), result.text == kMatmul,
                  std::move(result.trial)};
  // A trial's outcome is remembered when there is one. Where the problem was forgotten meanwhile
  // this serves one call, and the next one looks again.
  if (plan.trial == nullptr) plan.version = table.put_unless_forgotten(key, result.text, asked);
  tuning.unlock();
  if (result.after_unlock) result.after_unlock();
  return cache.put(std::move(plan));
}

CachedPlan& chosen(const TuneRequest& request) {
  CachedPlan* cached = PlanCache::of_this_thread().find(request.key);
  if (cached != nullptr && (!cached->provisional || is_capturing())) return *cached;
  return miss(request);
}

// How often a trial looks whether another thread has decided the same problem.
constexpr int64_t kLookEvery = 64;

// Ends the trial where it is decided, here or by another thread: the entry is then an ordinary one.
bool is_over(CachedPlan& cached) {
  OnlineTrial& trial = *cached.trial;
  auto& table = ChoiceTable::instance();
  if (const OnlineTrial::Implementation* winner = trial.decided()) {
    auto chosen = table.find(cached.key).text;
    if (chosen && *chosen != winner->text) {
      // Another thread was faster: all threads use one choice.
      if (auto other = remembered(cached.key)) {
        cached = *std::move(other);
        return true;
      }
      chosen.reset();
    }
    if (!chosen) {
      cached.version = table.put_unless_forgotten(cached.key, winner->text, cached.version);
    }
    cached.plan = winner->plan;
    cached.is_matmul = winner->text == kMatmul;
    cached.trial = nullptr;
    return true;
  }
  if (trial.schedule()->calls() % kLookEvery != kLookEvery - 1) return false;
  auto other = remembered(cached.key);
  if (!other) return false;
  cached = *std::move(other);
  return true;
}

// Without any workspace: what is left when the memory for the chosen engine's cannot be had.
TuneRequest without_workspace(const TuneRequest& request) {
  TuneRequest other = request;
  other.key.policy.sampling = register_sampling("heuristic");
  other.key.policy.workspace_limit = 0;
  return other;
}

// A range of the profiler, named by what runs; nothing while nobody listens.
class NamedRange {
 public:
  NamedRange(const CachedPlan& cached, bool is_undecided) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (C10_LIKELY(!callbacks.has_value())) return;
    range_.emplace(std::move(*callbacks));
    range_->before("cudnn_autotune::" + name(cached, is_undecided));
  }

 private:
  static std::string name(const CachedPlan& cached, bool is_undecided) {
    if (is_undecided) return "online";
    return cached.is_matmul ? kMatmul : cached.plan->config().text();
  }

  std::optional<at::RecordFunction> range_;
};

}  // namespace

void set_miss_handler(MissHandler handler) { miss_handler() = std::move(handler); }
void set_capture_miss_handler(CaptureMissHandler handler) {
  capture_miss_handler() = std::move(handler);
}

bool is_atens(const ChoiceKey& key) {
  const CachedPlan* cached = PlanCache::of_this_thread().find(key);
  return cached != nullptr && cached->plan == nullptr && !cached->is_matmul &&
         cached->trial == nullptr && !cached->provisional;
}

bool run_chosen(const TuneRequest& request) {
  CachedPlan& cached = chosen(request);
  const bool is_undecided = cached.trial != nullptr && !is_over(cached);
  if (cached.plan == nullptr && !cached.is_matmul && !is_undecided) return false;
  const NamedRange range(cached, is_undecided);
  if (cached.is_matmul && !is_undecided) {
    run_matmul(request.key.problem, request.x, request.w, request.y);
    return true;
  }
  // The cache may drop its own references while the launch is under way.
  const auto plan = cached.plan;
  const auto trial = cached.trial;
  try {
    if (is_undecided) {
      trial->run(request.key.problem, request.x, request.w, request.y);  // keeps what is captured
    } else {
      const bool captures = is_capturing();
      if (captures) keep_for_graphs(plan);
      execute(*plan, pointers(request.x, request.w, request.y), captures);
    }
    return true;
  } catch (const c10::OutOfMemoryError&) {
    if (request.key.policy.workspace_limit == 0) throw;
    count_fallback("the workspace of the chosen engine could not be allocated");
  }
  return run_chosen(without_workspace(request));
}

}  // namespace cudnn_autotune
