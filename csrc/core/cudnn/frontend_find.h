#pragma once

#include <cudnn.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/cudnn/conv_plan.h"

namespace cudnn_autotune {

// The values of the frontend's CudnnFindSamplingTechnique.
enum class FindTechnique { sample_once, median_of_three, till_stable };

struct FoundPlan {
  size_t index = 0;     // in the list of plans that was given
  float time_ms = 0;    // as time_sorted_plan reports it
  int64_t samples = 0;  // timed launches
};

struct FindResult {
  std::vector<FoundPlan> plans;  // fastest first; of plans with equal times the frontend keeps one
  int64_t total_samples = 0;     // timed launches of all plans, including those it dropped
};

// Calls the frontend's own `cudnn_frontend::time_sorted_plan` on the handle's stream, and waits for
// it. `workspace` is device memory for the largest workspace of the plans. The search ends after
// `benchmark_limit` plans have run; 0: all of them run. Unfused plans are searched apart, since
// they take other tensors; `add_bias` is called after each launch of one and enqueues the rest of
// the problem, so that it is timed too.
FindResult frontend_find(FindTechnique technique, cudnnHandle_t handle,
                         const std::vector<std::shared_ptr<ConvPlan>>& plans,
                         const ConvPointers& pointers, void* workspace, int64_t benchmark_limit,
                         const std::function<void()>& add_bias);

}  // namespace cudnn_autotune
