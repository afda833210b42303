#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// Binds plans of batch norms, what chooses them, and what compiles the kernel that folds them into
// weights. Only in builds with CUDA.
void bind_norms(pybind11::module_& m);

}  // namespace cudnn_autotune
