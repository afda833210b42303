#pragma once

#include <Python.h>

namespace cudnn_autotune {

// `_C.conv2d(input, weight, bias, stride, padding, dilation, groups, sampling, workspace_limit)`:
// the short way from a module's forward to the operator, some 3 microseconds less than
// `torch.ops`. Takes plain CUDA tensors, ints and tuples of ints; returns NotImplemented for all
// else (subclasses, modes, tracing, other devices), which functional.conv2d then sees to.
PyMethodDef python_conv_method();

}  // namespace cudnn_autotune
