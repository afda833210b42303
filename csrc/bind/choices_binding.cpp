#include "bind/bindings.h"

#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/python_calls.h"
#include "call/settings.h"
#include "call/torch_bridge.h"
#include "conv/aten_kernels.h"
#include "conv/engine_dispatch.h"
#include "conv/online_trial.h"
#include "core/choices/choice_table.h"
#include "core/choices/plan_cache.h"
#include "plan/plan.h"

namespace py = pybind11;

namespace cudnn_autotune {
namespace {

OnlineTrial::PreparationStep make_preparation_step(const py::function& function) {
  return [held = hold(function)](const Operands& operands) {
    const py::gil_scoped_acquire gil;
    using Answer = std::pair<std::shared_ptr<Plan>, int64_t>;
    auto [joins, calls_to_next] = (*held)(*py::cast(operands.list())).cast<Answer>();
    return OnlineTrial::StepResult{std::move(joins), calls_to_next};
  };
}

void bind_online_trial(py::module_& m) {
  using Sample = std::tuple<size_t, int64_t, double>;
  using Turn = std::pair<size_t, int64_t>;
  py::class_<TurnSchedule, std::shared_ptr<TurnSchedule>>(m, "TurnSchedule")
      .def("take_samples",
           [](TurnSchedule& schedule) {
             std::vector<Sample> samples;
             for (const auto& sample : schedule.take_samples()) {
               samples.emplace_back(sample.implementation, sample.round, sample.time_ms);
             }
             return samples;
           })
      .def("failures", &TurnSchedule::failures)
      .def("drop", &TurnSchedule::drop, py::arg("implementation"))
      .def("set_leader", &TurnSchedule::set_leader, py::arg("implementation"))
      .def("rest", &TurnSchedule::rest, py::arg("implementations"))
      .def("decide", &TurnSchedule::decide, py::arg("implementation"),
           py::arg("is_provisional") = false)
      .def_property_readonly("ran_out_of_memory", &TurnSchedule::ran_out_of_memory)
      .def_property_readonly("is_in_use", &TurnSchedule::is_in_use)
      .def_property_readonly("calls", &TurnSchedule::calls)
      .def_property_readonly("implementation_count", &TurnSchedule::implementation_count)
      .def("take_turn",
           [](TurnSchedule& schedule) -> std::optional<Turn> {
             const auto turn = schedule.take_turn();
             if (!turn) return std::nullopt;
             return Turn{turn->implementation, turn->round};
           })
      .def("leader", &TurnSchedule::leader)
      .def(
          "report",
          [](TurnSchedule& schedule, size_t implementation, int64_t round, double time_ms) {
            schedule.report({implementation, round, time_ms});
          },
          py::arg("implementation"), py::arg("round"), py::arg("time_ms"))
      .def("fail", &TurnSchedule::fail, py::arg("implementation"));
  py::class_<OnlineTrial, std::shared_ptr<OnlineTrial>>(m, "OnlineTrial")
      .def(py::init([](const std::shared_ptr<Plan>& first, const py::function& preparation_step,
                       int64_t first_step) {
             return std::make_shared<OnlineTrial>(first, make_preparation_step(preparation_step),
                                                  first_step);
           }),
           py::arg("first").none(false), py::arg("preparation_step"), py::arg("first_step") = 2)
      .def_property_readonly("schedule", &OnlineTrial::schedule)
      .def("join", &OnlineTrial::join, py::arg("implementation").none(false))
      .def_property_readonly("decided", [](const OnlineTrial& trial) -> std::optional<std::string> {
        const auto decided = trial.decided();
        return decided == nullptr ? std::nullopt : std::make_optional(decided->text());
      });
}

std::function<void()> make_after_unlock(const std::optional<py::function>& function) {
  if (!function) return nullptr;
  return [held = hold(*function)] {
    const py::gil_scoped_acquire gil;
    (*held)();
  };
}

void bind_choice_table(py::module_& m) {
  // The handlers' arguments and results are described in cudnn_autotune/_C.pyi. They are never
  // released, because misses may come as long as the process lives.
  m.def("set_miss_handler", [](const py::function& function) {
    auto* handler = new py::function(function);
    set_miss_handler([handler](const ChoiceKey& key, const Operands& operands,
                               const std::shared_ptr<Plan>& serving) {
      const py::gil_scoped_acquire gil;
      const Policy& policy = key.policy;
      const py::tuple answer =
          (*handler)(key.problem, sampling_name(policy.sampling), policy.workspace_limit,
                     policy.benchmark_limit, policy.device, *py::cast(operands.list()),
                     py::arg("serving") = serving);
      return TuneResult{answer[0].cast<std::shared_ptr<Plan>>(),
                        answer[1].cast<std::shared_ptr<OnlineTrial>>(), answer[2].cast<bool>(),
                        make_after_unlock(answer[3].cast<std::optional<py::function>>())};
    });
  });
  m.def("set_capture_miss_handler", [](const py::function& function) {
    auto* handler = new py::function(function);
    set_capture_miss_handler([handler](const ChoiceKey& key) {
      const py::gil_scoped_acquire gil;
      const Policy& policy = key.policy;
      return (*handler)(key.problem, sampling_name(policy.sampling), policy.workspace_limit,
                        policy.benchmark_limit, policy.device)
          .cast<std::shared_ptr<Plan>>();
    });
  });
  m.def("expected_gradients", [] {
    const ExpectedGradients& expected = ExpectedGradients::of_this_thread();
    return std::make_pair(expected.of_input, expected.of_weight);
  });
  // With the GIL, which a thread that forks holds: in the child nobody would free the table's lock.
  // Who holds that lock never waits for the GIL.
  m.def("forget_choices", [] { ChoiceTable::instance().forget_all(); });
  m.def(
      "forget_problem", [](const ConvProblem& problem) { ChoiceTable::instance().forget(problem); },
      py::arg("problem"));
  m.def("set_plan_cache_capacity", &PlanCache::set_capacity);
  m.def("plan_cache_capacity", &PlanCache::capacity);
}

}  // namespace

void bind_choices(py::module_& m) {
  bind_online_trial(m);
  bind_choice_table(m);
}

}  // namespace cudnn_autotune
