#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// Binds what keeps compiled plans. Only in builds with CUDA.
void bind_kept_plans(pybind11::module_& m);

}  // namespace cudnn_autotune
