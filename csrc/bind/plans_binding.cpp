#include "bind/bindings.h"

#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind/python_calls.h"
#include "call/torch_bridge.h"
#include "core/cuda/cuda_driver.h"
#include "core/cuda/graph_lifetime.h"
#include "core/cudnn/engine_list.h"
#include "core/problem/check.h"
#include "plan/build_plan.h"
#include "plan/plan.h"
#include "plan/pytorch_plans.h"
#include "plan/recipe_plan.h"

namespace py = pybind11;

namespace cudnn_autotune {
namespace {

using WithoutGilCall = py::call_guard<py::gil_scoped_release>;

at::Tensor execute_on(const std::shared_ptr<Plan>& plan, const py::args& tensors,
                      const std::optional<at::Tensor>& workspace) {
  const auto operands =
      Operands::from_list(plan->problem(), tensors.cast<std::vector<at::Tensor>>());
  const py::gil_scoped_release without_gil;
  const c10::Device device = operands.x.device();
  const c10::OptionalDeviceGuard guard(device);
  // Autograd would record the addition of a bias, and not the engine before it.
  const at::NoGradGuard no_grad;
  if (workspace && (workspace->nbytes() < static_cast<size_t>(plan->workspace_bytes()) ||
                    workspace->device() != device)) {
    throw std::invalid_argument("workspace must have " + std::to_string(plan->workspace_bytes()) +
                                " bytes or more, on the device of the tensors");
  }
  const bool captures = device.is_cuda() && is_capturing();
  if (captures) keep_for_graph(c10::cuda::getCurrentCUDAStream().stream(), plan);
  const at::Tensor result = workspace ? plan->launch(operands, workspace->data_ptr())
                                      : execute(*plan, operands, captures);
  return result.defined() ? result : operands.result(plan->problem().op);
}

// The builder is never released, because plans may be built as long as the process lives.
void set_python_builder(const py::function& function) {
  auto* builder = new py::function(function);
  set_plan_builder(
      [builder](const ConvProblem& problem, const std::string& text, c10::DeviceIndex device) {
        return ask_python([&] {
          const auto plan = (*builder)(problem, text, static_cast<int>(device));
          if (plan.is_none()) throw PlanError("the builder returned None");
          return plan.cast<std::shared_ptr<Plan>>();
        });
      });
}

// Launches of a recipe, as cudnn_autotune/_C.pyi describes them.

using NamedAddress = std::pair<std::string, int64_t>;

Address address(const NamedAddress& named) {
  return {by_name<Buffer>("launches: buffer", named.first, kBufferNames), named.second};
}

std::optional<Address> optional_address(const py::handle& named) {
  if (named.is_none()) return std::nullopt;
  return address(named.cast<NamedAddress>());
}

TensorMap tensor_map(const py::tuple& map) {
  return {address(map[1].cast<NamedAddress>()),
          by_name<DataType>("element", map[2].cast<std::string>(), kDataTypeNames),
          map[3].cast<std::vector<uint64_t>>(),
          map[4].cast<std::vector<uint64_t>>(),
          map[5].cast<std::vector<uint32_t>>(),
          map[6].cast<int>()};
}

KernelLaunch::Argument kernel_argument(const py::tuple& argument) {
  const auto type = argument[0].cast<std::string>();
  if (type == "tensor_map") return tensor_map(argument);
  if (type == "int32") return argument[1].cast<int32_t>();
  if (type == "int64") return argument[1].cast<int64_t>();
  if (type == "float") return argument[1].cast<float>();
  return address(argument.cast<NamedAddress>());
}

KernelLaunch kernel_launch(const py::tuple& launch) {
  using Dim3 = std::array<uint32_t, 3>;
  KernelLaunch kernel{launch[1].cast<std::string>(),
                      launch[2].cast<std::string>(),
                      launch[3].cast<Dim3>(),
                      launch[4].cast<Dim3>(),
                      launch[5].cast<Dim3>(),
                      launch[6].cast<int>(),
                      {}};
  for (const auto& argument : launch[7]) {
    kernel.arguments.push_back(kernel_argument(py::reinterpret_borrow<py::tuple>(argument)));
  }
  return kernel;
}

EngineLaunch engine_launch(const py::tuple& launch) {
  return {launch[1].cast<ConvProblem>(),
          launch[2].cast<std::string>(),
          address(launch[3].cast<NamedAddress>()),
          address(launch[4].cast<NamedAddress>()),
          address(launch[5].cast<NamedAddress>()),
          optional_address(launch[6]),
          optional_address(launch[7])};
}

FunctionLaunch function_launch(const py::tuple& launch) {
  return {[held = hold(launch[1].cast<py::function>())](const Operands& operands,
                                                        const at::Tensor& workspace) {
    ask_python([&] {
      auto tensors = operands.list();
      tensors.push_back(workspace);
      try {
        (*held)(*py::cast(tensors));
      } catch (const py::error_already_set& error) {
        throw_if_torchs(error);
        throw;
      }
    });
  }};
}

Launch launch_of(const py::tuple& launch) {
  const std::string kind = py::str(launch[0]);
  try {
    if (kind == "kernel") return kernel_launch(launch);
    if (kind == "engine") return engine_launch(launch);
    if (kind == "python") return function_launch(launch);
    throw std::invalid_argument("launches: there is no kind '" + kind + "'");
  } catch (const py::cast_error&) {
    throw std::invalid_argument("launches: a launch of kind '" + kind +
                                "' is not of the form that _C.pyi describes");
  }
}

std::shared_ptr<Plan> recipe_plan(const ConvProblem& problem, const std::string& text,
                                  const std::vector<py::tuple>& launches, int64_t workspace_bytes,
                                  int device) {
  if (launches.empty()) throw std::invalid_argument("launches: a recipe has at least one");
  if (workspace_bytes < 0) throw std::invalid_argument("workspace_bytes must be 0 or more");
  std::vector<Launch> all;
  for (const py::tuple& launch : launches) all.push_back(launch_of(launch));
  const py::gil_scoped_release without_gil;
  return RecipePlan::build(problem, text, all, workspace_bytes,
                           static_cast<c10::DeviceIndex>(device));
}

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

constexpr auto kPlanErrorDoc =
    R"(The error of a candidate that does not build or run. Its text names the candidate or the problem.

For example, of a candidate that another version of cuDNN had::

    try:
        plan = cudnn_autotune.expert.build_plan(problem, "eng67:KERNEL_CFG=3")
    except cudnn_autotune.PlanError as error:
        print(error)
)";
constexpr auto kCudnnErrorDoc =
    R"(The error of a call of cuDNN's that failed, a PlanError.

Its text names the call, its status and the problem, and the variables that make cuDNN log more::

    try:
        candidates = cudnn_autotune.expert.candidates(problem)
    except cudnn_autotune.CudnnError as error:  # cuDNN has no graph for the problem
        print(error)
)";

}  // namespace

void bind_plans(py::module_& m) {
  const auto& plan_error = py::register_exception<PlanError>(m, "PlanError", PyExc_RuntimeError);
  plan_error.doc() = kPlanErrorDoc;
  py::register_exception<CudnnError>(m, "CudnnError", plan_error).doc() = kCudnnErrorDoc;
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def_property_readonly("text", &Plan::text)
      .def_property_readonly("workspace_bytes", &Plan::workspace_bytes)
      .def_property_readonly("is_read_back", &Plan::is_read_back);
  m.def("is_engine", &is_engine, py::arg("text"));
  m.def(
      "build_plan",
      [](const ConvProblem& problem, const std::string& text, int device) {
        return build_plan(problem, text, static_cast<c10::DeviceIndex>(device));
      },
      py::arg("problem"), py::arg("text"), py::arg("device"), WithoutGilCall());
  m.def("set_plan_builder", &set_python_builder, py::arg("builder"));
  m.def("execute", &execute_on, py::arg("plan"), py::arg("workspace") = py::none());
  m.def("recipe_plan", &recipe_plan, py::arg("problem"), py::arg("text"), py::arg("launches"),
        py::arg("workspace_bytes"), py::arg("device"));
  m.def("loaded_cubins", &loaded_cubins);
  m.def(
      "kept_for_graphs",
      [] {
        release_of_destroyed_graphs();
        return kept_for_graphs();
      },
      WithoutGilCall());
  m.attr("MOST_UNUSED_CUBINS") = kMostUnusedCubins;
  m.def("is_matmul", &is_matmul, py::arg("problem"));
  m.def(
      "keep_plans",
      [](const std::string& behavior_note, const py::function& find, const py::function& keep) {
        set_kept_plans(make_kept_plans(behavior_note, find, keep));
      },
      py::arg("behavior_note"), py::arg("find"), py::arg("keep"));
}

}  // namespace cudnn_autotune
