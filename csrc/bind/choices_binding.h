#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// Binds the handlers of misses, OnlineTrial and TurnSchedule, and the functions that forget
// choices. Only in builds with CUDA.
void bind_choices(pybind11::module_& m);

}  // namespace cudnn_autotune
