#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// Binds PlanTimer, the frontend's samplers, the measurement of pages, and the comparison of an
// output with its reference. Only in builds with CUDA.
void bind_measuring(pybind11::module_& m);

}  // namespace cudnn_autotune
