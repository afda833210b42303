#pragma once

#include <torch/csrc/utils/pybind.h>

namespace cudnn_autotune {

// The parts of the module `_C`. cudnn_autotune/_C.pyi describes what they bind. Those that follow
// python_conv_methods() are only in builds with CUDA.

// `_C.conv1d`, `conv2d`, `conv3d`, `conv_transpose1d`, `conv_transpose2d` and `conv_transpose3d`:
// PyTorch's operator, called with a policy and without the parser of torch.nn.functional. They take
// the arguments of torch.nn.functional, and sampling and workspace_limit after them, all by
// position: plain CUDA tensors, ints and tuples of ints. For all else (tensor subclasses, torch
// function modes, tracing, other devices) they return NotImplemented, and functional.py calls
// torch.nn.functional.
//
// `_C.enter_policy(sampling, workspace_limit)` and `_C.leave_policy()` begin and end the scope of a
// policy on this thread (call_policy.h). The first returns False, and begins none, for arguments
// that it does not take. Returns a table that ends with an empty entry, as PyModule_AddFunctions
// wants it.
PyMethodDef* python_conv_methods();

void bind_plans(pybind11::module_& m);  // what builds and runs them, and what keeps compiled ones
// ConvProblem and EngineList. It comes before the rest, because it loads libcudnn's functions.
void bind_engines(pybind11::module_& m);
void bind_measuring(pybind11::module_& m);  // stopwatch, frontend's samplers, pages, comparison
void bind_choices(pybind11::module_& m);    // handlers of misses, trials, what forgets choices

}  // namespace cudnn_autotune
