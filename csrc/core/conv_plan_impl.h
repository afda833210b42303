#pragma once

#include <cudnn_frontend.h>

#include "core/conv_plan.h"

namespace cudnn_autotune {

struct ConvPlan::Impl {
  cudnn_frontend::ExecutionPlan plan;
};

}  // namespace cudnn_autotune
