#include "bind/bindings.h"

#include <c10/core/DeviceGuard.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "call/aten_conv.h"
#include "call/torch_bridge.h"
#include "call/workspace_pages.h"
#include "core/cudnn/frontend_find.h"
#include "core/problem/check.h"
#include "measure/plan_timer.h"
#include "measure/sampled_reference.h"
#include "plan/build_plan.h"

namespace py = pybind11;

namespace cudnn_autotune {
namespace {

using WithoutGilCall = py::call_guard<py::gil_scoped_release>;
using Tensors = std::vector<at::Tensor>;  // Operands::list()

constexpr std::array kTechniqueNames{"sample_once", "median_of_three", "till_stable"};

std::vector<std::shared_ptr<ConvPlan>> engines_of(const std::vector<std::shared_ptr<Plan>>& plans) {
  std::vector<std::shared_ptr<ConvPlan>> engines;
  for (const auto& plan : plans) {
    const auto* engine = dynamic_cast<const EnginePlan*>(plan.get());
    TORCH_CHECK_VALUE(engine != nullptr, "plans: ", plan->text(), " is no engine of cuDNN");
    engines.push_back(engine->engine());
  }
  return engines;
}

void bind_frontend_find(py::module_& m) {
  m.def(
      "frontend_find",
      [](const std::string& name, const std::vector<std::shared_ptr<Plan>>& plans,
         const Tensors& tensors, const std::optional<at::Tensor>& workspace,
         int64_t benchmark_limit) {
        using Found = std::tuple<size_t, float, int64_t>;
        if (plans.empty()) return std::pair(std::vector<Found>(), int64_t{0});
        const auto engines = engines_of(plans);
        const auto room = workspace ? static_cast<int64_t>(workspace->nbytes()) : 0;
        for (const auto& plan : plans) {
          TORCH_CHECK_VALUE(plan->workspace_bytes() <= room, "workspace: ", plan->text(), " needs ",
                            plan->workspace_bytes(), " bytes, got ", room);
        }
        const Operands operands = Operands::from_list(plans[0]->problem(), tensors);
        const c10::DeviceGuard guard(operands.x.device());
        const std::lock_guard measuring(measuring_mutex(operands.x.device().index()));
        const auto result = frontend_find(
            by_name<FindTechnique>("technique", name, kTechniqueNames), current_handle(), engines,
            operands.pointers(), workspace ? workspace->data_ptr() : nullptr, benchmark_limit,
            [&] { add_bias(operands.y, operands.bias); });
        std::vector<Found> found;
        for (const auto& plan : result.plans) {
          found.emplace_back(plan.index, plan.time_ms, plan.samples);
        }
        return std::pair(std::move(found), result.total_samples);
      },
      py::arg("technique"), py::arg("plans"), py::arg("tensors"), py::arg("workspace"),
      py::arg("benchmark_limit"), WithoutGilCall());
}

void bind_plan_timer(py::module_& m) {
  using Sample = std::tuple<double, double, double, std::string>;
  using Batch = std::tuple<size_t, int64_t, bool, bool>;
  auto timer = py::class_<PlanTimer>(m, "PlanTimer");
  timer.attr("PLACE_BYTES") = PlanTimer::kPlaceBytes;
  timer.attr("PLACES") = PlanTimer::kPlaces;
  timer
      .def(py::init([](const ConvProblem& problem, const std::vector<Tensors>& sets,
                       int64_t flush_bytes, bool workspace_pages) {
             // Not a call_guard, under which pybind11 would also register the new object: in a
             // table that other threads change meanwhile.
             const py::gil_scoped_release without_gil;
             std::vector<Operands> operands;
             for (const auto& set : sets) operands.push_back(Operands::from_list(problem, set));
             return std::make_unique<PlanTimer>(std::move(operands), flush_bytes, workspace_pages);
           }),
           py::arg("problem"), py::arg("operands"), py::arg("flush_bytes"),
           py::arg("workspace_pages") = true)
      .def("add", &PlanTimer::add, py::arg("plan").none(false))
      .def("set_workspace", &PlanTimer::set_workspace, py::arg("workspace"), WithoutGilCall())
      .def(
          "run",
          [](PlanTimer& timer, const std::vector<Batch>& batches, size_t lead) {
            std::vector<PlanTimer::Batch> wanted;
            for (const auto& [candidate, calls, cold, as_graph] : batches) {
              wanted.push_back({candidate, calls, cold, as_graph});
            }
            std::vector<Sample> samples;
            for (auto& sample : timer.run(wanted, lead)) {
              samples.emplace_back(sample.time_ms, sample.clock_mhz, sample.loading_ms,
                                   std::move(sample.error));
            }
            return samples;
          },
          py::arg("batches"), py::arg("lead"), WithoutGilCall());
}

void bind_checking(py::module_& m) {
  m.def(
      "compare_output",
      [](const ConvProblem& problem, const Tensors& tensors, uint64_t seed) {
        return compare_output(problem, Operands::from_list(problem, tensors), seed);
      },
      py::arg("problem"), py::arg("tensors"), py::arg("seed"), WithoutGilCall());
  m.def(
      "read_comparison",
      [](const at::Tensor& numbers) {
        auto found = read_comparison(numbers);
        return std::tuple(found.norm, found.error, found.local, found.filled,
                          std::move(found.largest));
      },
      py::arg("numbers"));
}

void bind_pages(py::module_& m) {
  m.def("far_pages", &PageDistance::far, py::arg("cycles"));
  m.def(
      "workspace_pages",
      [](int64_t device) {
        const c10::DeviceGuard guard(
            c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
        const WorkspacePages::Count count = WorkspacePages::of_current_device().count();
        return std::pair(count.all, count.unused);
      },
      py::arg("device"), WithoutGilCall());
}

}  // namespace

void bind_measuring(py::module_& m) {
  bind_frontend_find(m);
  bind_plan_timer(m);
  bind_checking(m);
  bind_pages(m);
}

}  // namespace cudnn_autotune
