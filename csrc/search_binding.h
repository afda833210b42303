#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// ConvProblem, EngineSearch and Plan; binds libcudnn, and so comes first. Only in builds with CUDA.
void bind_search(pybind11::module_& m);

}  // namespace cudnn_autotune
