#pragma once

#include <memory>

#include "plan.h"

namespace cudnn_autotune {

// Keeps a plan alive until the process ends. It is called for each plan that a CUDA graph captures:
// the graph replays the plan's kernels, which may be unloaded with the plan when the plan cache
// drops it. Safe to call from several threads.
void keep_for_graphs(const std::shared_ptr<Plan>& plan);

}  // namespace cudnn_autotune
