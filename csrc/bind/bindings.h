#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace cudnn_autotune {

// The parts of the module `_C`. cudnn_autotune/_C.pyi describes what they bind. Those that follow
// python_norm_methods() are only in builds with CUDA.

// An entry of a table of methods: a function that takes its arguments by position.
using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
inline PyMethodDef fast_method(const char* name, FastFunction function) {
  const auto any = reinterpret_cast<void (*)()>(function);
  return {name, reinterpret_cast<PyCFunction>(any), METH_FASTCALL, "See csrc/bind/bindings.h."};
}
// Whether a function is given as many arguments as it expects; else TypeError is set.
inline bool has_count(Py_ssize_t count, Py_ssize_t expected) {
  if (count != expected) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
  }
  return count == expected;
}

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
// `_C.group_norm(module, input, weight, bias, groups, eps, casts)` returns the output of a group
// norm of an input in channels_last, in that layout, if the kernels were chosen for the module's
// call. With `casts` autocast computes it in float32. Returns NotImplemented where PyTorch computes
// the call, and None where the module's class computes it, and lays the output out as PyTorch does:
// for an input in another layout, tensor subclasses, transforms, modes and tracers.
//
// `_C.set_norm_device(name)` sets the type of device whose norms the kernels may compute: "cuda",
// or in tests "cpu".
PyMethodDef* python_norm_methods();

// Binds a guard as a context manager of Python, which must be entered and left on one thread.
template <typename Guard>
void bind_context(pybind11::module_& m, const char* name) {
  struct Context {
    std::optional<Guard> guard;
  };
  pybind11::class_<Context>(m, name)
      .def(pybind11::init<>())
      .def("__enter__", [](Context& context) { context.guard.emplace(); })
      .def("__exit__", [](Context& context, const pybind11::args&) { context.guard.reset(); });
}

void bind_plans(pybind11::module_& m);  // what builds and runs them, and what keeps compiled ones
// ConvProblem and EngineList. It comes before the rest, because it loads libcudnn's functions.
void bind_engines(pybind11::module_& m);
void bind_measuring(pybind11::module_& m);  // stopwatch, frontend's samplers, pages, comparison
void bind_choices(pybind11::module_& m);    // handlers of misses, trials, what forgets choices
void bind_norms(pybind11::module_& m);      // plans of norms, what chooses them; folded weights

}  // namespace cudnn_autotune
