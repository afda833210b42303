#pragma once

#include <memory>

#include "core/conv_plan.h"

namespace cudnn_autotune {

// A graph replays a plan's kernels, which may be unloaded with the plan; and plans are dropped as a
// matter of course. So those that were captured stay, for as long as the process lives.
void keep_for_graphs(const std::shared_ptr<ConvPlan>& plan);

}  // namespace cudnn_autotune
