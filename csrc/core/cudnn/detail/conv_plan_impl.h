#pragma once

#include <cudnn_frontend.h>

#include <memory>

#include "core/cudnn/conv_plan.h"

namespace cudnn_autotune {

struct ConvPlan::Impl {
  cudnn_frontend::ExecutionPlan plan;
};

std::shared_ptr<ConvPlan> make_conv_plan(cudnn_frontend::ExecutionPlan plan,
                                         const ConvProblem& problem, const EngineConfig& config,
                                         bool is_read_back);

}  // namespace cudnn_autotune
