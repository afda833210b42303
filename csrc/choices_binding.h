#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// The miss handler, the trials that it may start, and the table of choices. Only in builds with
// CUDA.
void bind_choices(pybind11::module_& m);

}  // namespace cudnn_autotune
