#pragma once

#include <Python.h>

namespace cudnn_autotune {

// Batch norm modules: the forward of PyTorch's class without its Python, and in training on a GPU
// whichever was chosen for calls like it (cudnn_autotune/norms/choices.py). All arguments are
// given by position.
//
// `_C.batch_norm(module, input, activation, tail, takes_all)` returns what the norm and the modules
// behind it make of the input: by the operator with the activation, or by PyTorch's function, whose
// result the modules of the tuple `tail` are called with in turn. Returns NotImplemented if the
// operator could compute the call, and nothing was chosen for such calls of the module. Returns
// None, and has changed nothing, for calls that the module's class has to compute: those with
// tensor subclasses, transforms, modes, tracers or a cumulative average, those that are PyTorch's
// error before its function is called, and without `takes_all` whatever the operator does not
// compute: another device, evaluation, other dtypes, vectors that do not fit the input, hooks on
// saved tensors.
//
// `_C.choose_norm(module, input, activation, by_operator, most_calls)` chooses for the next
// `most_calls` calls like this one, or with 0 for all, until the module is destroyed or forgotten,
// or has had hundreds of choices more.
//
// `_C.forget_norms()` forgets all choices. `_C.set_norm_device(name)` sets the type of device
// whose norms the operator may compute: "cuda", or in tests "cpu".
//
// Returns a table that ends with an empty entry, as PyModule_AddFunctions wants it.
PyMethodDef* python_norm_methods();

}  // namespace cudnn_autotune
