#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// ConvProblem, EngineSearch, Plan, the frontend's samplers and the miss handler. Only in builds
// with CUDA.
void bind_search(pybind11::module_& m);

}  // namespace cudnn_autotune
