#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// PlanTimer, the frontend's samplers, and single runs. Only in builds with CUDA.
void bind_measuring(pybind11::module_& m);

}  // namespace cudnn_autotune
