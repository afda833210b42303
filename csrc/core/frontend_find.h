#pragma once

#include <cudnn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/conv_plan.h"

namespace cudnn_autotune {

// CudnnFindSamplingTechnique of the frontend.
enum class FindTechnique { sample_once, median_of_three, till_stable };

struct FoundPlan {
  size_t index = 0;     // into the plans that were given
  float time_ms = 0;    // as time_sorted_plan reports it
  int64_t samples = 0;  // timed launches
};

struct FindResult {
  std::vector<FoundPlan> plans;  // fastest first; plans with equal times vanish in cuDNN's set
  int64_t total_samples = 0;     // timed launches of all plans, those that vanished included
};

// `cudnn_frontend::time_sorted_plan` itself, on the handle's stream, which it synchronises.
// `benchmark_limit` ends it after that many plans have run; 0: never.
FindResult frontend_find(FindTechnique technique, cudnnHandle_t handle,
                         const std::vector<std::shared_ptr<ConvPlan>>& plans,
                         const ConvPointers& pointers, void* workspace, int64_t benchmark_limit);

}  // namespace cudnn_autotune
