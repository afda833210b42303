#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// Binds ConvProblem, EngineSearch and Plan. It is called before the others, because it loads the
// functions of libcudnn. Only in builds with CUDA.
void bind_search(pybind11::module_& m);

}  // namespace cudnn_autotune
