#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "call/torch_bridge.h"
#include "core/choices/plan_cache.h"
#include "core/problem/check.h"

namespace cudnn_autotune {

// Keeps a Python function alive. The last copy may be destroyed on a thread without the GIL, at the
// end of a thread, and after the interpreter has ended.
inline std::shared_ptr<pybind11::function> hold(const pybind11::function& function) {
  return {new pybind11::function(function), [](pybind11::function* last) {
            if (is_interpreter_gone()) return;
            const auto destroy = [](void* held) {
              delete static_cast<pybind11::function*>(held);
              return 0;
            };
            // The function may hold tensors, and a thread that ends cannot free memory of a GPU
            // any more. Python's main thread does, unless it has too much to do already.
            if (PlanCache::is_thread_ending() && Py_AddPendingCall(destroy, last) == 0) return;
            const pybind11::gil_scoped_acquire gil;
            destroy(last);
          }};
}

// Throws what torch throws in C++ where a Python exception stands for it: that memory of a GPU is
// short, or that a GPU is lost. Returns for any other. Needs the GIL.
inline void throw_if_torchs(const pybind11::error_already_set& error) {
  const auto torch = pybind11::module_::import("torch");
  const auto message = [&] { return std::string(pybind11::str(error.value())); };
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  if (error.matches(torch.attr("OutOfMemoryError"))) throw c10::OutOfMemoryError(here, message());
  if (error.matches(torch.attr("AcceleratorError"))) {
    const auto code = pybind11::getattr(error.value(), "error_code", pybind11::int_(0));
    throw c10::AcceleratorError(here, code.cast<int32_t>(), message());
  }
}

// Calls what calls Python, under the GIL. Throws PlanError for Python's exceptions, except those
// that end a program, such as KeyboardInterrupt.
template <typename Call>
auto ask_python(const Call& call) {
  if (is_interpreter_gone()) throw PlanError("Python has ended");
  const pybind11::gil_scoped_acquire gil;
  try {
    return call();
  } catch (pybind11::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    const std::string type = pybind11::str(error.type().attr("__name__"));
    throw PlanError(type + ": " + std::string(pybind11::str(error.value())));
  } catch (const pybind11::cast_error& error) {
    throw PlanError(error.what());
  }
}

}  // namespace cudnn_autotune
