#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "bind/bindings.h"
#include "build_info.h"
#include "call/aten_conv.h"
#include "call/call_policy.h"
#include "call/fallback_counts.h"
#include "call/settings.h"
#ifdef CUDNN_AUTOTUNE_WITH_CUDA
#include "conv/aten_kernels.h"
#endif

namespace py = pybind11;

namespace cudnn_autotune {
namespace {

// ProbeGuard as a context manager of Python. It must be entered and left on one thread.
class Probe {
 public:
  explicit Probe(int32_t number) : number_(number) {}
  void enter() { guard_.emplace(number_, calls_); }
  void exit() { guard_.reset(); }
  py::dict calls() const {
    const std::lock_guard lock(calls_->mutex);
    py::dict found;
    for (const auto& [key, count] : calls_->counts) found[py::bytes(key)] = count;
    return found;
  }

 private:
  int32_t number_;
  std::shared_ptr<ProbedCalls> calls_ = std::make_shared<ProbedCalls>();
  std::optional<ProbeGuard> guard_;
};

void bind_settings(py::module_& m) {
  py::class_<Settings>(m, "Settings")
      .def_property_readonly("sampling",
                             [](const Settings& s) { return sampling_name(s.sampling); })
      .def_readonly("workspace_limit", &Settings::workspace_limit)
      .def_readonly("benchmark_limit", &Settings::benchmark_limit);
  m.def("settings", &settings);
  m.def("set_sampling", [](const std::string& name) { set_sampling(register_sampling(name)); });
  m.def("set_workspace_limit", &set_workspace_limit);
  m.def("set_benchmark_limit", &set_benchmark_limit);
  m.def("benchmark_limit_of_call", &benchmark_limit_of_call);
  py::class_<Probe>(m, "Probe")
      .def(py::init<int32_t>(), py::arg("number"))
      .def("__enter__", &Probe::enter)
      .def("__exit__", [](Probe& probe, const py::args&) { probe.exit(); })
      .def("calls", &Probe::calls);
  m.def("register_sampling", [](const std::string& name) { register_sampling(name); });
}

void bind_policies(py::module_& m) {
  py::class_<ProcessWidePolicy>(m, "ProcessWidePolicy")
      .def(py::init<std::string, int64_t>(), py::arg("sampling"), py::arg("workspace_limit"))
      .def_readonly("sampling", &ProcessWidePolicy::sampling)
      .def_readonly("workspace_limit", &ProcessWidePolicy::workspace_limit);
  m.def("process_wide", &process_wide);
  m.def("exchange_process_wide", &exchange_process_wide, py::arg("policy"));
  bind_context<OwnPathGuard>(m, "OwnPath");
  m.def(
      "policy_of_call",
      [](const at::Tensor& input) -> std::optional<std::pair<std::string, int64_t>> {
        const auto policy = policy_of_call(input);
        if (!policy) return std::nullopt;
        return std::pair(std::string(policy->sampling), policy->workspace_limit);
      },
      py::arg("input"));
}

#ifdef CUDNN_AUTOTUNE_WITH_CUDA
void bind_aten_kernels(py::module_& m) {
  py::class_<AtenKernels>(m, "AtenKernels")
      .def(py::init([](const std::string& backend) {
             return std::make_unique<AtenKernels>(c10::parseDispatchKey(backend));
           }),
           py::arg("backend"));
  const auto serve = [](const std::string& backend) {
    // Never destroyed, because PyTorch's dispatcher may be gone before.
    static auto* const kept = new std::vector<std::unique_ptr<AtenKernels>>;
    kept->push_back(std::make_unique<AtenKernels>(c10::parseDispatchKey(backend)));
  };
  m.def("serve_process_wide", serve, py::arg("backend"));
  // Here and not when they are first wanted: then other threads may be reading the table of kernels
  // that this writes.
  serve("CUDA");
}
#endif

}  // namespace
}  // namespace cudnn_autotune

PYBIND11_MODULE(_C, m) {
  using namespace cudnn_autotune;
  bind_settings(m);
  bind_policies(m);
  m.def("fallbacks", &fallbacks);
  m.def("count_fallback", &count_fallback, py::arg("reason"));
  m.def("clear_fallbacks", &clear_fallbacks);
  for (PyMethodDef* methods : {python_conv_methods(), python_norm_methods()}) {
    if (PyModule_AddFunctions(m.ptr(), methods) < 0) throw py::error_already_set();
  }
  m.attr("built_with_torch") = CUDNN_AUTOTUNE_TORCH_VERSION;
  m.attr("built_with_cuda") = CUDNN_AUTOTUNE_CUDA_VERSION;
#ifdef CUDNN_AUTOTUNE_WITH_CUDA
  bind_plans(m);
  bind_engines(m);
  bind_measuring(m);
  bind_choices(m);
  bind_norms(m);
  bind_aten_kernels(m);
#endif
}
