#pragma once

#include <Python.h>

namespace cudnn_autotune {

// `_C.conv2d(input, weight, bias, stride, padding, dilation, groups, sampling, workspace_limit)`:
// the fast path from Python to the operator, some 3 microseconds faster than `torch.ops`. It takes
// plain CUDA tensors, ints and tuples of ints. For all else (tensor subclasses, torch function
// modes, tracing, other devices) it returns NotImplemented, and nn/functional.py takes over.
PyMethodDef python_conv_method();

}  // namespace cudnn_autotune
