#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <memory>

#include "core/choices/plan_cache.h"
#include "core/problem/conv_problem.h"
#include "plan/operands.h"
#include "plan/plan.h"

namespace cudnn_autotune {

class OnlineTrial;

// What a handler in Python answers to a miss.
struct TuneResult {
  std::shared_ptr<Plan> plan;
  std::shared_ptr<OnlineTrial> trial;  // compares plans in the calls to come; mostly null
  // Whether the plan serves for some calls only, after which the handler is asked again.
  bool is_provisional = false;
  // Called after the tuning mutex is unlocked, since it may wait for other processes. May be empty.
  std::function<void()> after_unlock;
};

// Chooses an engine for a problem, by a search where nothing is known of it. It may overwrite the
// tensor that the operation writes. `serving` is the provisional plan that has served until now, or
// null.
using MissHandler = std::function<TuneResult(const ChoiceKey& key, const Operands& operands,
                                             const std::shared_ptr<Plan>& serving)>;
void set_miss_handler(MissHandler handler);

// Answers a miss while a stream is captured, when nothing may be timed or run: with what is known
// of the key and was checked when it was tuned, or else with what PyTorch would run.
using CaptureMissHandler = std::function<std::shared_ptr<Plan>(const ChoiceKey& key)>;
void set_capture_miss_handler(CaptureMissHandler handler);

// Finds what computes `key`. On a hit that is one lookup in this thread's plan cache. On a miss it
// is built from the choice that is known in this process, or else the miss handler chooses; only
// then is `operands` called, which may allocate. The result keeps its plan or trial alive, because
// the cache may drop its entry while the call runs. Throws what the handlers and `operands` throw.
ChosenPath lookup(const ChoiceKey& key, c10::function_ref<const Operands&()> operands);

// Whether the path is a plan that allocates the result, as PyTorch's own path does.
bool allocates_result(const ChosenPath& path);

// Computes the problem on the current stream. `path` is the result of lookup(key), and does not
// allocate the result. If the memory for its workspace, or for what a function of Python's
// allocates, cannot be had, the best plan without a workspace runs instead; if that is PyTorch's
// own path, or runs out of memory too, nothing is run and the result is false. Throws PlanError and
// c10::Error.
bool run(const ChosenPath& path, const ChoiceKey& key, const Operands& operands);

}  // namespace cudnn_autotune
