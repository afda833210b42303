#pragma once

#include <Python.h>

namespace cudnn_autotune {

// `_C.conv1d`, `conv2d`, `conv3d`, `conv_transpose1d`, `conv_transpose2d` and `conv_transpose3d`:
// the fast path from Python to the operators, some 3 microseconds faster than `torch.ops`. They
// take the arguments of torch.nn.functional, and sampling and workspace_limit after them, all by
// position. They take plain CUDA tensors, ints and tuples of ints. For all else (tensor subclasses,
// torch function modes, tracing, other devices) they return NotImplemented, and nn/functional.py
// takes over. Returns a table that ends with an empty entry, as PyModule_AddFunctions wants it.
PyMethodDef* python_conv_methods();

}  // namespace cudnn_autotune
