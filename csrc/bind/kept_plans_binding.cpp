#include "bind/kept_plans_binding.h"

#include <c10/cuda/CUDAFunctions.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "call/torch_bridge.h"
#include "core/cudnn/kept_plans.h"

namespace py = pybind11;

namespace cudnn_autotune {
namespace {

// Calls a Python function that raises nothing but KeyboardInterrupt, which is raised again once the
// main thread runs Python.
template <typename Call>
void call_python(const Call& call) {
  if (is_interpreter_gone()) return;
  const py::gil_scoped_acquire gil;
  try {
    call();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();
    } else {
      error.discard_as_unraisable("kept plans");
    }
  }
}

py::tuple python_name(const PlanName& name) {
  const py::object gpu = name.gpu.empty()
                             ? py::object(py::int_(static_cast<int>(c10::cuda::current_device())))
                             : py::object(py::str(name.gpu));
  return py::make_tuple(name.problem, name.engine, gpu);
}

// The functions are never released, because plans may be built as long as the process lives.
std::shared_ptr<const KeptPlans> make_kept_plans(const std::string& behavior_note,
                                                 const py::function& find,
                                                 const py::function& keep) {
  auto kept = std::make_shared<KeptPlans>();
  kept->behavior_note = behavior_note;
  kept->find = [function = new py::function(find)](const PlanName& name) {
    std::optional<std::string> found;
    call_python([&] {
      const py::object answer = (*function)(*python_name(name));
      if (!answer.is_none()) found = answer.cast<std::string>();
    });
    return found;
  };
  kept->keep = [function = new py::function(keep)](const PlanName& name,
                                                   const std::string& serialized) {
    call_python([&] { (*function)(*python_name(name), py::bytes(serialized)); });
  };
  return kept;
}

}  // namespace

void bind_kept_plans(py::module_& m) {
  m.def(
      "keep_plans",
      [](const std::string& behavior_note, const py::function& find, const py::function& keep) {
        set_kept_plans(make_kept_plans(behavior_note, find, keep));
      },
      py::arg("behavior_note"), py::arg("find"), py::arg("keep"));
}

}  // namespace cudnn_autotune
