#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/conv_plan.h"
#include "core/conv_problem.h"

namespace cudnn_autotune {

class OnlineTrial;

// What the policy (Python) is asked on a miss, and what it answers. The tensors are the forward's
// three, in the problem's layout; the one that the operation writes may be overwritten freely.
struct TuneRequest {
  ChoiceKey key;
  at::Tensor x, w, y;
};
struct TuneResult {
  std::string text;                    // an engine config, kAten or kMatmul
  std::shared_ptr<ConvPlan> plan;      // built while tuning; null for those without an engine
  std::shared_ptr<OnlineTrial> trial;  // to be decided in the calls to come; else null
  // What is to be done once other threads may tune: it may wait for other processes. May be empty.
  std::function<void()> after_unlock;
};
using MissHandler = std::function<TuneResult(const TuneRequest&)>;
void set_miss_handler(MissHandler handler);

// What the policy is asked while a stream is being captured, when nothing may be timed or run: what
// is known of the key, and was checked where it was tuned; nullopt where there is none.
using CaptureMissHandler = std::function<std::optional<TuneResult>(const ChoiceKey&)>;
void set_capture_miss_handler(CaptureMissHandler handler);

// Whether ATen is the choice, as far as this thread knows: then no memory need be had for an
// engine.
bool is_atens(const ChoiceKey& key);

// Runs the engine chosen for `request.key`, choosing it first where it is not chosen yet. False
// where ATen is the choice and nothing was run. Throws CudnnError, c10::OutOfMemoryError.
bool run_chosen(const TuneRequest& request);

}  // namespace cudnn_autotune
