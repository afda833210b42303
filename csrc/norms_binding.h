#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// Binds plans of batch norms, and what chooses them. Only in builds with CUDA.
void bind_norms(pybind11::module_& m);

}  // namespace cudnn_autotune
