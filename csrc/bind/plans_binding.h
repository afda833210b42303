#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// Binds plans, what builds them and what runs them. Only in builds with CUDA.
void bind_plans(pybind11::module_& m);

}  // namespace cudnn_autotune
