#include "choices_binding.h"

#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/choice_table.h"
#include "core/plan_cache.h"
#include "online_trial.h"
#include "policy.h"
#include "tuner.h"

namespace py = pybind11;

namespace cudnn_autotune {
namespace {

using WithoutGilCall = py::call_guard<py::gil_scoped_release>;

using Way = std::pair<std::string, std::shared_ptr<ConvPlan>>;

// A thread's plan cache, and with it the chore, may outlive the interpreter.
bool is_interpreter_gone() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

// May be let go by a thread without the GIL.
std::shared_ptr<py::function> hold(const py::function& function) {
  return {new py::function(function), [](py::function* last) {
            if (is_interpreter_gone()) return;
            const py::gil_scoped_acquire gil;
            delete last;
          }};
}

OnlineTrial::Chore make_chore(const py::function& function) {
  return [held = hold(function)](const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
    const py::gil_scoped_acquire gil;
    auto [joins, is_more] = (*held)(x, w, y).cast<std::pair<std::optional<Way>, bool>>();
    OnlineTrial::Done done;
    if (joins) done.joins = OnlineTrial::Way{std::move(joins->first), std::move(joins->second)};
    done.is_more = is_more;
    return done;
  };
}

void bind_online_trial(py::module_& m) {
  using Sample = std::tuple<size_t, int64_t, double>;
  using Turn = std::tuple<size_t, int64_t, bool>;
  py::class_<TrialLedger, std::shared_ptr<TrialLedger>>(m, "TrialLedger")
      .def("take_samples",
           [](TrialLedger& ledger) {
             std::vector<Sample> samples;
             for (const auto& sample : ledger.take_samples()) {
               samples.emplace_back(sample.way, sample.round, sample.time_ms);
             }
             return samples;
           })
      .def("failures", &TrialLedger::failures)
      .def("drop", &TrialLedger::drop, py::arg("way"))
      .def("lead", &TrialLedger::lead, py::arg("way"))
      .def("decide", &TrialLedger::decide, py::arg("way"))
      .def_property_readonly("is_in_use", &TrialLedger::is_in_use)
      .def_property_readonly("calls", &TrialLedger::calls)
      .def_property_readonly("ways", &TrialLedger::ways)
      .def("take_turn",
           [](TrialLedger& ledger) -> std::optional<Turn> {
             const auto turn = ledger.take_turn();
             if (!turn) return std::nullopt;
             return Turn{turn->way, turn->round, turn->is_first};
           })
      .def("leading", &TrialLedger::leading)
      .def(
          "report",
          [](TrialLedger& ledger, size_t way, int64_t round, double time_ms) {
            ledger.report({way, round, time_ms});
          },
          py::arg("way"), py::arg("round"), py::arg("time_ms"))
      .def("fail", &TrialLedger::fail, py::arg("way"));
  py::class_<OnlineTrial, std::shared_ptr<OnlineTrial>>(m, "OnlineTrial")
      .def(py::init([](const Way& first, const py::function& chore) {
             return std::make_shared<OnlineTrial>(OnlineTrial::Way{first.first, first.second},
                                                  make_chore(chore));
           }),
           py::arg("first"), py::arg("chore"))
      .def_property_readonly("ledger", &OnlineTrial::ledger)
      .def(
          "join", [](OnlineTrial& trial, const Way& way) { trial.join({way.first, way.second}); },
          py::arg("way"))
      .def_property_readonly("decided", [](const OnlineTrial& trial) -> std::optional<std::string> {
        const OnlineTrial::Way* way = trial.decided();
        return way == nullptr ? std::nullopt : std::make_optional(way->text);
      });
}

std::function<void()> make_afterwards(const std::optional<py::function>& function) {
  if (!function) return nullptr;
  return [held = hold(*function)] {
    const py::gil_scoped_acquire gil;
    (*held)();
  };
}

void bind_choice_table(py::module_& m) {
  // handler(problem, sampling, workspace_limit, benchmark_limit, device, x, w, y)
  //   -> (engine text, "aten" or "matmul", Plan or None, OnlineTrial or None,
  //       what is to be done afterwards or None)
  m.def("set_miss_handler", [](const py::function& function) {
    // Never released: misses may come as long as the process lives.
    auto* handler = new py::function(function);
    set_miss_handler([handler](const TuneRequest& request) {
      const py::gil_scoped_acquire gil;
      const Policy& policy = request.key.policy;
      const py::tuple answer =
          (*handler)(request.key.problem, sampling_name(policy.sampling), policy.workspace_limit,
                     policy.benchmark_limit, policy.device, request.x, request.w, request.y);
      return TuneResult{answer[0].cast<std::string>(), answer[1].cast<std::shared_ptr<ConvPlan>>(),
                        answer[2].cast<std::shared_ptr<OnlineTrial>>(),
                        make_afterwards(answer[3].cast<std::optional<py::function>>())};
    });
  });
  // handler(problem, sampling, workspace_limit, benchmark_limit, device)
  //   -> (engine text, "aten" or "matmul", Plan or None), or None
  m.def("set_known_handler", [](const py::function& function) {
    auto* handler = new py::function(function);  // never released, as above
    set_known_handler([handler](const ChoiceKey& key) -> std::optional<TuneResult> {
      const py::gil_scoped_acquire gil;
      const Policy& policy = key.policy;
      auto way = (*handler)(key.problem, sampling_name(policy.sampling), policy.workspace_limit,
                            policy.benchmark_limit, policy.device)
                     .cast<std::optional<Way>>();
      if (!way) return std::nullopt;
      return TuneResult{std::move(way->first), std::move(way->second), nullptr};
    });
  });
  m.def("forget_choices", [] { ChoiceTable::instance().forget_all(); }, WithoutGilCall());
  m.def(
      "forget_problem", [](const ConvProblem& problem) { ChoiceTable::instance().forget(problem); },
      py::arg("problem"), WithoutGilCall());
  m.def("set_plan_cache_capacity", &PlanCache::set_capacity);
  m.def("plan_cache_capacity", &PlanCache::capacity);
}

}  // namespace

void bind_choices(py::module_& m) {
  bind_online_trial(m);
  bind_choice_table(m);
}

}  // namespace cudnn_autotune
