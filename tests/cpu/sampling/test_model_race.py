"""The race over all problems of a model, on recordings and simulated GPUs."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.conv.problems import make
from support.simulation import engine, timer_of
from support.store.stored import H200

import cudnn_autotune as ca
from cudnn_autotune import ConvProblem
from cudnn_autotune.audit import recordings
from cudnn_autotune.audit.offline.replay import ReplayTimer
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.models.tune import _say_that_nothing_is_tuned
from cudnn_autotune.models.tuning import Progress, tune_together
from cudnn_autotune.sampling.auto import AUTO
from cudnn_autotune.sampling.model_race import Entrant, ModelRace, is_final, rules, steps_in_model
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Budget, Limits
from cudnn_autotune.store.decision import Decision, was_cut_short
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.timer import Batch, Sample

CALLS = {"h200_vgg_dgrad": 8, "h200_resnet50_fprop": 2, "h200_forum": 1}


def entrant(problem: Any, timer: Any, calls: int = 1, seed: int = 0) -> Entrant[Any]:
    found = SearchState(timer, Budget(timer, Limits()), rules(), random.Random(seed))
    return Entrant(problem, calls, found, steps_in_model(found, timer.candidates, Limits()))


def replayed(name: str, seed: int, calls: int = 1) -> Entrant[Any]:
    return entrant(name, ReplayTimer(recordings.load(name), seed), calls, seed)


def recorded_model(seed: int) -> list[Entrant[Any]]:
    """A step of eight calls of one recorded layer, two of another and one of a third."""
    return [replayed(name, seed, calls) for name, calls in CALLS.items()]


def regret(one: Entrant[Any]) -> float:
    selection = one.selection()
    timer: Any = one.found.timer
    cold, hot = timer.truth("burst", "cold"), timer.truth("burst", "hot")
    truth = {text: math.sqrt(cold[text] * hot[text]) for text in cold if text in hot}
    return truth[selection.winner.candidate.text] / min(truth.values()) - 1


def ignore(one: Entrant[Any]) -> None:
    """What is decided does not matter here."""


def test_a_recorded_model_is_raced_to_the_target() -> None:
    losses = []
    for seed in range(8):
        decided: list[str] = []
        race = ModelRace(recorded_model(seed), lambda one, log=decided: log.append(one.problem))
        assert race.expected_loss() == math.inf
        race.run()
        assert sorted(decided) == sorted(recordings.names())
        assert race.expected_loss() <= 0.002
        step_ms = sum(one.step_ms for one in race.entrants)
        losses.append(sum(one.step_ms * regret(one) for one in race.entrants) / step_ms)
    assert sum(losses) / len(losses) <= 0.002


def test_small_problems_of_a_model_are_raced_until_they_are_clear() -> None:
    """Their part of the step is too small for its target."""
    chosen = set()
    for seed in range(8):
        small = replayed("h200_resnet50_fprop", seed)
        ModelRace([replayed("h200_vgg_dgrad", seed, 1000), small], ignore).run()
        assert small.found.last.is_clear() or small.found.last.rounds >= 12
        chosen.add(small.selection().winner.candidate.text)
    assert len(chosen) == 1


def compiled_late(name: str) -> Entrant[Any]:
    """A problem whose fastest engine is compiled for a long time."""
    slow = engine("late", 0.8, build_ms=400.0)
    listed = dataclasses.replace(
        slow.candidate, behavior_notes=("RUNTIME_COMPILATION",), heuristic_mode="FALLBACK"
    )
    engines = [engine("a", 1.0), engine("b", 1.004), dataclasses.replace(slow, candidate=listed)]
    return entrant(name, timer_of(*engines, built=False))


def test_a_problem_whose_plans_are_compiled_comes_after_the_others() -> None:
    late = compiled_late("late")
    others = [replayed("h200_resnet50_fprop", seed) for seed in range(3)]
    order: list[tuple[Any, bool, bool]] = []
    for one in (late, *others):
        advance = one.advance

        def noted(one: Entrant[Any] = one, advance: Callable[[], None] = advance) -> None:
            order.append((one, one.waits, all(other.is_over for other in others)))
            advance()

        one.advance = noted  # type: ignore[method-assign]
    ModelRace([late, *others], ignore, target=0.0).run()
    waited = [is_last for one, waits, is_last in order if waits]
    assert waited == [True], "it waits once, when nothing else is left to measure"
    assert late.selection().winner.candidate.text == "late"


class Interrupted:
    """A timer in whose run the user presses Ctrl-C."""

    def __init__(self, timer: Any, at_ms: float) -> None:
        self._timer, self._at_ms = timer, at_ms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        if self._timer.elapsed_ms() >= self._at_ms:
            self._at_ms = math.inf
            raise KeyboardInterrupt
        found: list[Sample] = self._timer.run(batches)
        return found


class Recorded:
    """A ``model_tuning.Searches`` of recordings, with a store on disk."""

    def __init__(self, folder: Path, most_open: int = 99, interrupt_ms: float = math.inf) -> None:
        self.store = Store(folder, H200)
        self.recorded = {recordings.load(name).problem: name for name in recordings.names()}
        self.most_open, self.interrupt_ms = most_open, interrupt_ms
        self.open_now: dict[ConvProblem, Any] = {}
        self.committed: list[ConvProblem] = []
        self.spent_ms = 0.0
        self.most_at_once = 0

    def known(self, problem: ConvProblem) -> Decision | None:
        found = self.store.find(problem)
        return found if found and is_final(found.selection) else None

    def earlier(self, problem: ConvProblem) -> Decision | None:
        return self.store.find(problem)

    def room_for(self, problem: ConvProblem) -> bool:
        return len(self.open_now) < self.most_open

    def open(self, problem: ConvProblem, calls: int) -> Entrant[ConvProblem] | None:
        timer = ReplayTimer(recordings.load(self.recorded[problem]), 1)
        self.open_now[problem] = timer
        self.most_at_once = max(self.most_at_once, len(self.open_now))
        return entrant(problem, Interrupted(timer, self.interrupt_ms), calls)

    def untimed(self, problem: ConvProblem) -> Decision:
        return Decision(problem, Policy("auto"), Selection((Measurement(OWN_PATH, None, 0),), 0))

    def commit(self, entrant: Entrant[ConvProblem], selection: Selection | None) -> Decision:
        assert selection is not None
        self.close(entrant)
        self.committed.append(entrant.problem)
        made = Decision(entrant.problem, Policy("auto"), selection)
        self.store.add([made])
        return made

    def close(self, entrant: Entrant[ConvProblem]) -> None:
        self.spent_ms += self.open_now.pop(entrant.problem).elapsed_ms()

    def now_s(self) -> float:
        """As if all timers were one GPU's."""
        return (self.spent_ms + sum(t.elapsed_ms() for t in self.open_now.values())) / 1e3

    def tune(self, **given: Any) -> list[Decision]:
        calls = {problem: CALLS[name] for problem, name in self.recorded.items()}
        return tune_together(calls, self, now_s=self.now_s, **given)


@pytest.mark.parametrize("most_open", [99, 2, 1])
def test_a_model_is_tuned_as_far_as_memory_allows(tmp_path: Path, most_open: int) -> None:
    place = Recorded(tmp_path, most_open)
    said: list[Progress] = []
    made = place.tune(report=said.append)
    assert [decision.problem for decision in made] == list(place.recorded)
    assert place.most_at_once == min(most_open, 3)
    assert {d.problem for d in Store(tmp_path, H200)} == set(place.recorded)
    assert said[-1] == Progress(3, 3, None)
    losses = [one.expected_loss for one in said if one.expected_loss is not None]
    assert losses
    assert losses[-1] <= losses[0]
    # What is known is not raced again.
    again = Recorded(tmp_path, most_open)
    assert [d.problem for d in again.tune()] == [d.problem for d in made]
    assert again.committed == []


def test_without_any_time_nothing_is_timed(tmp_path: Path) -> None:
    place = Recorded(tmp_path)
    made = place.tune(budget_s=0)
    assert [decision.selection.total_samples for decision in made] == [0, 0, 0]
    assert (place.committed, place.now_s(), len(Store(tmp_path, H200))) == ([], 0.0, 0)


def test_a_budget_is_kept_and_what_was_timed_is_decided(tmp_path: Path) -> None:
    whole = Recorded(tmp_path / "whole")
    whole.tune()
    short = Recorded(tmp_path / "short")
    made = short.tune(budget_s=0.06)
    assert short.now_s() < whole.now_s() - 0.1
    timed = [d.problem for d in made if d.selection.total_samples]
    assert timed
    assert any("one launch of each" in text for d in made for text in d.selection.evidence.remarks)
    assert {d.problem for d in Store(tmp_path / "short", H200)} == set(timed)
    # What was not compared with all others serves no process that gives more time.
    hasty = [d for d in made if d.selection.total_samples and was_cut_short(d, None)]
    assert hasty
    for decision in hasty:
        evidence = decision.selection.evidence
        assert not is_final(decision.selection)
        assert (evidence.regret_bound, evidence.budget_ms) == (None, evidence.wall_ms)
    assert not any(was_cut_short(decision, None) for decision in whole.tune())


def test_an_interruption_keeps_what_was_raced(tmp_path: Path) -> None:
    place = Recorded(tmp_path, interrupt_ms=60.0)
    with pytest.raises(KeyboardInterrupt):
        place.tune()
    kept = list(Store(tmp_path, H200))
    assert kept
    assert {decision.problem for decision in kept} == set(place.committed)
    assert place.open_now == {}
    for decision in kept:
        assert decision.chosen.time_ms is not None
    # The next call races what was interrupted, and nothing that was over.
    final = {decision.problem for decision in kept if is_final(decision.selection)}
    assert final < set(place.recorded)
    rest = Recorded(tmp_path)
    made = rest.tune()
    assert set(rest.committed) == set(place.recorded) - final
    assert all(is_final(decision.selection) for decision in made)


@pytest.mark.parametrize("at", range(3))
def test_an_interrupted_commit_is_made_again(tmp_path: Path, at: int) -> None:
    """Also when the race is over, and what it leaves undecided is committed."""
    place = Recorded(tmp_path)
    commit, fails = place.commit, [index == at for index in reversed(range(3))]

    def interrupted(one: Entrant[ConvProblem], selection: Selection | None) -> Decision:
        if fails.pop() if fails else False:
            raise KeyboardInterrupt
        return commit(one, selection)

    place.commit = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        place.tune()
    kept = list(Store(tmp_path, H200))
    assert {decision.problem for decision in kept} == set(place.recorded)
    if at == 2:
        assert all(is_final(decision.selection) for decision in kept), "the race was over"


def by_first_calls(place: Recorded, samples: int) -> dict[ConvProblem, Decision]:
    """Fills the store with decisions that no race of a model has made."""
    made = {}
    for problem, name in place.recorded.items():
        selection = dataclasses.replace(AUTO, seed=1).select(*_replay(name), Limits())
        assert selection is not None
        selection = dataclasses.replace(selection, total_samples=samples)
        made[problem] = Decision(problem, Policy("auto"), selection)
    place.store.add(list(made.values()))
    return made


def _replay(name: str) -> tuple[Any, ReplayTimer]:
    timer = ReplayTimer(recordings.load(name), 1)
    return timer.candidates, timer


@pytest.mark.parametrize("budget_s", [0.0, 0.06])
def test_a_race_that_is_cut_short_does_not_replace_what_was_timed_longer(
    tmp_path: Path, budget_s: float
) -> None:
    place = Recorded(tmp_path)
    before = by_first_calls(place, 10**6)
    made = place.tune(budget_s=budget_s)
    assert place.committed == []
    assert {decision.problem for decision in made} == set(before)
    assert all(decision.selection.total_samples == 10**6 for decision in made)


def test_a_race_that_is_cut_short_replaces_what_was_timed_for_less(tmp_path: Path) -> None:
    place = Recorded(tmp_path)
    by_first_calls(place, 1)
    made = {decision.problem: decision for decision in place.tune(budget_s=0.06)}
    assert place.committed
    assert not any(is_final(made[problem].selection) for problem in place.committed)


@pytest.mark.basic(4)
@pytest.mark.parametrize("at_ms", range(0, 400, 25))
def test_a_search_that_is_interrupted_anywhere_can_be_concluded(at_ms: int) -> None:
    one = entrant("one", Interrupted(ReplayTimer(recordings.load("h200_vgg_dgrad"), 1), at_ms))
    with suppress(KeyboardInterrupt):
        while not one.is_over:
            one.advance()
    assert not one.is_over, "it was interrupted"
    one.end()
    assert (one.selection() is None) == (not one.found.screening.rough_ms)


def test_what_cannot_be_tuned_is_said() -> None:
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="model must have a convolution that cudnn_autotune"):
            ca.tune(layer, x)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        ca.tune("resnet50", x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="train must be a bool, got str"):
        ca.tune(layer, x, train="yes")  # type: ignore[arg-type]
    with ca.flags("online"), pytest.raises(ValueError, match="decides in later calls"):
        ca.tune(layer, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_tuned_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = ca.Conv2d(3, 4, 3)
    _say_that_nothing_is_tuned.cache_clear()
    for tune in (ca.tune, ca.distributed.tune, ca.tune):
        assert tune(model, torch.ones(1, 3, 8, 8)) == []
    (record,) = caplog.records
    assert record.getMessage().startswith("tune() tunes nothing: ")


def test_a_finished_search_is_the_threads_own() -> None:
    """Another thread's call of the problem may be on another GPU, where no plan of it runs."""
    from cudnn_autotune.tuning import miss

    problem, seen = make("resnet_fp16_nhwc"), []
    timer: Any = SimpleNamespace(plans={})
    concluded = SimpleNamespace(problem=problem, is_probe=False, device=None)

    def call() -> None:
        try:
            miss._search(concluded, "auto")  # type: ignore[arg-type]
        except Exception as error:
            seen.append(error)

    with miss.searched(problem, None, timer):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    (error,) = seen
    assert "on_device" in str(error), "it begins a search of its own"
