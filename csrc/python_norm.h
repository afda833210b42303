#pragma once

#include <Python.h>

namespace cudnn_autotune {

// Batch norm modules in training, each call of which is computed as it was chosen for calls like it
// (cudnn_autotune/nn/norm_choices.py). All arguments are given by position.
//
// `_C.train_norm(module, input, activation, tail)` returns what the norm and the modules behind it
// make of the input: by the operator with the activation, or by PyTorch's function, whose result
// the modules of the tuple `tail` are called with in turn. Returns NotImplemented if nothing was
// chosen for such calls of the module. Returns None, and changes nothing, for calls that neither
// computes as the module does: a device that is not served, evaluation, momentum=None, other
// dtypes, vectors that do not fit the input, tensor subclasses, transforms, modes, tracers.
//
// `_C.choose_norm(module, input, activation, by_operator)` chooses for calls like this one, until
// the module is destroyed or forgotten, or has had hundreds of choices more.
//
// `_C.forget_norms()` forgets all choices. `_C.set_norm_device(name)` sets the type of device that
// is served: "cuda", or in tests "cpu".
//
// Returns a table that ends with an empty entry, as PyModule_AddFunctions wants it.
PyMethodDef* python_norm_methods();

}  // namespace cudnn_autotune
