#include "bind/bindings.h"

#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/python_calls.h"
#include "norm/aten_norms.h"
#include "norm/norm_choices.h"
#include "norm/norm_ops.h"
#include "norm/norm_plan.h"
#include "weights/weight_ops.h"

namespace py = pybind11;

namespace cudnn_autotune {
namespace {

using LaunchTuple = std::tuple<py::bytes, std::string, uint32_t, uint32_t, int>;

std::shared_ptr<NormPlan> make_plan(const std::vector<LaunchTuple>& launches,
                                    const std::array<int32_t, 3>& division,
                                    const std::array<int64_t, 2>& workspace, size_t counters,
                                    size_t pointers, size_t floats) {
  std::vector<NormLaunch> all;
  for (const auto& [cubin, function, blocks, threads, shared_bytes] : launches) {
    all.push_back({std::string(cubin), function, blocks, threads, shared_bytes});
  }
  const py::gil_scoped_release without_gil;
  return std::make_shared<NormPlan>(all, NormDivision{division[0], division[1], division[2]},
                                    NormWorkspace{workspace[0], workspace[1]}, counters, pointers,
                                    floats);
}

// The functions are never released, because operators may be called as long as the process lives.
void set_planner(const py::function& function) {
  auto* const planner = new py::function(function);
  set_norm_planner([planner](const NormKey& key) {
    return ask_python([&] {
      return (*planner)(static_cast<int>(key.device), key.form, key.is_backward, key.dtype,
                        key.parameters, key.batch, key.channels, key.spatial, key.planes,
                        key.alignment, kNormActivations[key.activation], key.residual,
                        key.by_output, key.second, key.grad_residual, key.grad_input, key.mask,
                        key.groups)
          .cast<std::shared_ptr<NormPlan>>();
    });
  });
}

void set_chooser(const py::function& function) {
  auto* const chooser = new py::function(function);
  set_norm_chooser([chooser](const NormCall& call, const NormKind& kind, void* module,
                             std::string_view sampling) -> std::optional<NormVerdict> {
    return ask_python([&]() -> std::optional<NormVerdict> {
      py::object norm = py::none();
      if (module != nullptr)
        norm = py::reinterpret_borrow<py::object>(static_cast<PyObject*>(module));
      const py::object chosen =
          (*chooser)(call.input, call.weight, call.bias, call.running_mean, call.running_var,
                     call.eps, kNormActivations[kind.activation], kind.groups, norm, sampling);
      if (chosen.is_none()) return std::nullopt;
      const auto [is_served, most_calls] = chosen.cast<std::pair<bool, int64_t>>();
      return NormVerdict{is_served, most_calls};
    });
  });
}

void set_kernels(const py::function& function) {
  auto* const kernels = new py::function(function);
  set_weight_kernels(
      [kernels](c10::DeviceIndex device, at::ScalarType weight, at::ScalarType folded) {
        return ask_python(
            [&] { return std::string((*kernels)(device, weight, folded).cast<py::bytes>()); });
      });
}

}  // namespace

void bind_norms(py::module_& m) {
  py::class_<NormPlan, std::shared_ptr<NormPlan>>(m, "NormPlan")
      .def(py::init(&make_plan), py::arg("launches"), py::arg("division"), py::arg("workspace"),
           py::arg("counters"), py::arg("pointers"), py::arg("floats"));
  bind_context<NormsByKernelsGuard>(m, "NormsByKernels");
  m.def("set_norm_planner", &set_planner, py::arg("planner"));
  m.def("set_norm_chooser", &set_chooser, py::arg("chooser"));
  m.def("forget_aten_norms", &forget_norms);
  m.def("is_of_kernels", &is_of_kernels, py::arg("mean"));
  m.def("set_weight_kernels", &set_kernels, py::arg("kernels"));
  m.def("set_norm_form", &set_norm_form, py::arg("form"));
  m.def("set_norm_form_of_thread", &set_norm_form_of_thread, py::arg("form"), py::arg("adopts"));
}

}  // namespace cudnn_autotune
