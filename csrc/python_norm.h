#pragma once

#include <Python.h>

namespace cudnn_autotune {

// Batch norm modules: the forward of PyTorch's class without its Python. Like all norms they are
// computed by whichever was chosen (norm_choices.h). All arguments are given by position.
//
// `_C.batch_norm(module, input, activation, tail, takes_all)` returns what the norm and the modules
// behind it make of the input. Without an activation that is PyTorch's function, whose operators
// ask for the module. With one the kernels compute both, or PyTorch's function computes the norm,
// and the modules of the tuple `tail` are called in turn. Returns None, and has changed nothing,
// for calls that the module's class has to compute: those with tensor subclasses, transforms,
// modes, tracers or a cumulative average, those that are PyTorch's error before its function is
// called, and without `takes_all` whatever the kernels do not compute: another device, evaluation,
// other dtypes, vectors that do not fit the input, hooks on saved tensors.
//
// `_C.set_norm_device(name)` sets the type of device whose norms the kernels may compute: "cuda",
// or in tests "cpu".
//
// Returns a table that ends with an empty entry, as PyModule_AddFunctions wants it.
PyMethodDef* python_norm_methods();

}  // namespace cudnn_autotune
