"""``online``'s beliefs: turns go in, a choice comes out; no GPU has a part in it."""

from __future__ import annotations

import itertools
import json
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from support import simulation
from support.simulation import (
    GPU,
    SimulatedEngine,
    StaticCandidates,
    candidate,
    engine,
    online,
    timer_of,
)
from support.tuning.made_up_plans import plan_of
from support.tuning.online_trials import FIRST, Calls, Committed, Undecided, race_of

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.online import preparation as online_calls
from cudnn_autotune.online.mode import Online
from cudnn_autotune.online.preparation import OnlinePreparation
from cudnn_autotune.online.race import OnlineRace
from cudnn_autotune.online.tuner import OnlineTuner, Prepared, Trial
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.ties import TIE_WIDTH
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import checking
from cudnn_autotune.tuning.choice import Choice

# The race


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_is_chosen(seed: int) -> None:
    race = race_of(5)
    calls = Calls(race, [1.03, 1.0, 1.4, 1.1, 3.0], seed)
    assert calls.decide() == 1
    assert calls.rounds >= race.rules.least_rounds
    selection = race.selection(1)
    assert selection.winner.candidate == race.candidates[1]
    assert selection.evidence.rule == "fastest"
    assert selection.evidence.tied == ("c1",)
    assert selection.winner.time_ms == pytest.approx(1.0, rel=0.01)


def test_what_all_share_in_a_round_does_not_count() -> None:
    """Clock, temperature, other work: tens of percent from round to round, the same for all."""
    rng = random.Random(3)
    race = race_of(3)
    calls = Calls(race, [1.02, 1.0, 1.06])
    assert calls.decide(lambda: rng.uniform(-0.5, 0.5), noise=0.004) == 1
    assert calls.rounds < 100


def test_the_slow_are_dropped_after_two_turns() -> None:
    race = race_of(3)
    calls = Calls(race, [1.0, 2.0, 1.02])
    calls.round()
    race.judge()
    assert race.active == {0, 1, 2}, "one turn may have been disturbed"
    calls.round()
    race.judge()
    assert race.active == {0, 2}
    assert "times the best" in race.eliminated[1]
    assert calls.decide() == 0
    slow = {t.candidate.text: t for t in race.selection(0).ranking}["c1"]
    assert slow.samples == 2
    assert slow.time_ms == pytest.approx(2.0, rel=0.05)
    assert slow.eliminated == race.eliminated[1]


@pytest.mark.parametrize("at_once", [True, False])
def test_the_order_of_joins_does_not_matter(at_once: bool) -> None:
    """The fast one joins last, when the others have long been compared."""
    race = race_of(2)
    calls = Calls(race, [1.10, 1.0, 1.05, 0.97])
    late = [candidate("c2", 2), candidate("c3", 3)]
    if at_once:
        race.join(late)
    else:
        for some in late:
            for _ in range(6):
                calls.round()
            race.judge()
            race.join([some])
        assert race.active >= {2, 3} or 3 in race.active
    assert calls.decide() == 3
    assert {t.candidate.text for t in race.selection(3).ranking} == {"c0", "c1", "c2", "c3"}


def test_a_candidate_that_joins_is_compared_before_the_decision() -> None:
    race = race_of(2)
    calls = Calls(race, [1.0, 1.3])
    for _ in range(30):
        calls.round()
    race.join([candidate("c2", 2)])
    calls.times_ms.append(0.9)
    assert race.judge() is None
    assert calls.decide() == 2


def test_those_that_were_dropped_serve_where_the_best_fails() -> None:
    race = race_of(3)
    calls = Calls(race, [1.0, 3.0, 2.0])
    for _ in range(3):
        calls.round()
    race.judge()
    assert race.active == {0}
    assert race.next_best() == 0
    race.fail(0, "failed")
    assert race.next_best() == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_of_equals_ties(seed: int) -> None:
    """And the rules of ties choose: less workspace first, whatever the noise says."""
    race = OnlineRace([candidate("hungry", 0, 2**20), candidate("modest", 1)])
    calls = Calls(race, [1.0, 1.0], seed)
    chosen = calls.decide(noise=0.004)
    selection = race.selection(chosen)
    assert set(selection.evidence.tied) == {"hungry", "modest"}
    assert chosen == 1
    assert selection.evidence.rule == "tie: less workspace"


def test_it_ends_though_nothing_can_be_told_apart() -> None:
    race = race_of(4)
    calls = Calls(race, [1.0, 1.0, 1.003, 1.006])
    chosen = calls.decide(noise=0.3)
    assert calls.rounds == race.rules.most_rounds
    bound = race.selection(chosen).evidence.regret_bound
    assert bound > TIE_WIDTH, "it does not claim what it does not know"


@pytest.mark.parametrize("seed", range(5))
def test_the_worse_half_gives_way_and_the_bound_still_covers_it(seed: int) -> None:
    times = [1.0 + 0.01 * i for i in range(16)]
    random.Random(seed).shuffle(times)
    race = race_of(len(times))
    calls = Calls(race, times, seed)
    chosen = calls.decide(noise=0.04)
    assert race.turns <= 260
    assert times[chosen] <= 1.04
    bound = race.selection(chosen).evidence.regret_bound
    assert times[chosen] - 1 <= bound


def test_a_selection_survives_json() -> None:
    race = OnlineRace([candidate("a", 0, 5, "RUNTIME_COMPILATION"), candidate("b", 1), OWN_PATH])
    calls = Calls(race, [1.0, 2.5, 1.002])
    race.join([candidate("never-ran", 3)])
    race.fail(3, "failed")
    chosen = calls.decide(noise=0.002)
    selection = race.selection(chosen, 12.5, ["a remark"])
    stored = json.loads(json.dumps(selection.to_json(), allow_nan=False))
    assert Selection.from_json(stored) == selection
    assert selection.evidence.wall_ms == 12.5
    assert selection.evidence.remarks == ("a remark",)
    assert selection.total_samples == race.turns
    assert selection.evidence.gpu_ms > 0
    for timed in selection.ranking:
        if timed.low_ms is not None:
            assert timed.low_ms <= timed.time_ms <= timed.high_ms
    never = {t.candidate.text: t for t in selection.ranking}["never-ran"]
    assert (never.time_ms, never.samples, never.eliminated) == (None, 0, "failed")


# Which candidates join


def listed(*candidates: Candidate, aten_uses_cudnn: bool = True) -> StaticCandidates:
    return StaticCandidates(list(candidates), aten_uses_cudnn)


def compiled(text: str, rank: int, mode: str) -> Candidate:
    one = candidate(text, rank, 0, "RUNTIME_COMPILATION")
    assert one.is_compiled
    return replace(one, heuristic_mode=mode)


def test_what_is_compiled_at_run_time_takes_part() -> None:
    a, b = candidate("a"), candidate("b", 1)
    of_a, of_b = compiled("of_a", 2, "A"), compiled("of_b", 3, "B")
    last, unlisted = compiled("last", 4, "FALLBACK"), compiled("unlisted", 5, "")
    everyone = listed(of_a, a, of_b, last, unlisted, b)
    assert Online().shortlist(everyone) == [a, b, of_a, last, unlisted]
    assert Online().shortlist(everyone, 1) == [a]
    assert Online().shortlist(everyone, 3) == [a, b, of_a], "the limit is that of cuDNN's list"


# The race over a timer


def select(timer: simulation.SimulatedTimer, limits: Limits | None = None) -> Selection | None:
    return online.select(timer.candidates, timer, limits)


@pytest.mark.parametrize("name", simulation.preset_names())
def test_presets(name: str) -> None:
    regrets = []
    for seed in range(3):
        timer = simulation.preset(name, seed)
        selection = select(timer)
        truth = timer.truth("burst", "hot")
        texts = [t.candidate.text for t in selection.ranking]
        assert len(set(texts)) == len(texts)
        assert selection.winner.candidate.text in selection.evidence.tied
        assert selection.evidence.wall_ms > 0
        assert Selection.from_json(selection.to_json()) == selection
        could_win = [t for t in texts if t in truth]
        best = min(truth[t] for t in could_win)
        regrets.append(truth[selection.winner.candidate.text] / best - 1)
    assert np.median(regrets) <= 0.02, regrets


def test_what_is_compiled_late_is_chosen_where_it_is_fastest() -> None:
    late = {
        text: SimulatedEngine(compiled(text, rank, mode), time_ms, 100.0, build_ms=300.0)
        for text, rank, mode, time_ms in (("last", 7, "FALLBACK", 0.8), ("slow", 8, "A", 2.0))
    }
    selection = select(timer_of(engine("a", 1.0), engine("b", 1.1), *late.values(), built=False))
    assert selection.winner.candidate.text == "last"
    assert {m.candidate.text for m in selection.ranking} == {"a", "b", "last", "slow"}
    limits = Limits(budget_ms=50.0)
    timer = timer_of(engine("a", 1.0, build_ms=1.0), *late.values(), built=False)
    selection = select(timer, limits)
    assert selection.evidence.remarks, "the budget did not allow to compile both"


@pytest.mark.parametrize("limit", [1, 2])
def test_benchmark_limit(limit: int) -> None:
    engines = [engine(f"e{i}", 1.0 + 0.1 * i) for i in (3, 2, 1, 0)]
    selection = select(timer_of(*engines), Limits(benchmark_limit=limit))
    assert {t.candidate.text for t in selection.ranking} == {"e3", "e2"} - (
        {"e2"} if limit == 1 else set()
    )


def test_a_budget_bounds_who_is_built() -> None:
    engines = [engine(f"e{i}", 1.0 - 0.1 * i, build_ms=50.0) for i in range(5)]
    selection = select(timer_of(*engines, built=False), Limits(budget_ms=120.0))
    assert {t.candidate.text for t in selection.ranking} == {"e0", "e1", "e2"}
    assert selection.evidence.remarks == ("the budget left 2 of 5 candidates unseen",)
    assert selection.evidence.budget_ms == 120.0
    assert selection.evidence.regret_bound is None
    selection = select(timer_of(*engines, built=False), Limits(budget_ms=1e6))
    assert (len(selection.ranking), selection.evidence.remarks) == (5, ())
    assert selection.evidence.budget_ms is None
    assert selection.evidence.regret_bound is not None


@pytest.mark.parametrize(
    ("field", "error"),
    [("lost_at_ms", RuntimeError), ("out_of_memory_at_ms", torch.OutOfMemoryError)],
)
def test_a_lost_device_is_a_clear_error(field: str, error: type[Exception]) -> None:
    gpu = replace(GPU, **{field: 6.0})
    engines: list[SimulatedEngine] = [engine("a", 1.0), engine("b", 1.01)]
    with pytest.raises(error, match="CUDA"):
        select(timer_of(*engines, gpu=gpu))


# The trial that carries it out: all but the GPU's part


@pytest.mark.search
def test_each_has_a_turn_a_round() -> None:
    one = Undecided()
    assert one.schedule.take_turn() is None, "alone, there is nothing to compare"
    one.join(candidate("eng1:", 1), candidate("eng2:", 2))
    assert one.schedule.implementation_count == 3
    times = [1.0, 1.1, 1.2]
    for round_ in range(2):
        assert sorted(one.turns(3, times)) == [0, 1, 2]
        samples = one.schedule.take_samples()
        assert sorted(index for index, _, _ in samples) == [0, 1, 2]
        assert {sample[1] for sample in samples} == {round_}
    assert one.schedule.take_samples() == [], "taken"
    one.schedule.drop(1)
    assert set(one.turns(6, times)) == {0, 2}
    assert one.schedule.fail(0), "another one is left"
    assert one.schedule.failures() == [0]
    assert set(one.turns(3, times)) == {2}
    assert one.schedule.leader() == 2, "the default leader has failed"
    assert one.schedule.fail(2), "one that was dropped as slow serves again"
    assert one.schedule.leader() == 1
    assert not one.schedule.fail(1), "that was the last one"


@pytest.mark.search
def test_one_of_each_two_calls_is_the_leaders_and_not_timed() -> None:
    one = Undecided()
    one.join(candidate("eng1:", 1), candidate("eng2:", 2))
    given = [one.schedule.take_turn() for _ in range(120)]
    pairs = list(zip(given[::2], given[1::2], strict=True))
    assert all((first is None) != (second is None) for first, second in pairs)
    measured = [turn[0] for turn in given if turn]
    assert [measured.count(index) for index in range(3)] == [20, 20, 20]
    # By lot: two layers that share a problem are both timed.
    assert 10 < sum(first is None for first, _ in pairs) < 50
    one.schedule.set_leader(2)
    assert one.schedule.leader() == 2


@pytest.mark.search
def test_who_is_not_there_is_an_error() -> None:
    one = Undecided()
    calls: list[Callable[[int], None]] = [
        one.schedule.drop,
        one.schedule.set_leader,
        one.schedule.decide,
    ]
    for call in calls:
        with pytest.raises(IndexError):
            call(1)
    assert one.native.decided is None


@pytest.mark.search
def test_the_fastest_is_decided_without_a_gpu() -> None:
    """Samples in, drop, lead and decide out: the thread itself, where no device is."""
    one = Undecided()
    tuner = OnlineTuner()
    tuner.add(one.trial)
    assert (tuner.undecided, tuner.preparing) == (1, 1)
    times = [1.05, 2.0, 1.0, 1.2]
    one.join(candidate("eng1:", 1), candidate("eng2:", 2))
    one.turns(60, times)
    time.sleep(0.1)
    assert one.native.decided is None, "one is still to join"
    one.join(candidate("eng3:", 3))
    one.prepared.checks.errors["eng2:"] = 1e-4
    one.prepared.is_over = True
    assert tuner.preparing == 0
    was_initialized = torch.cuda.is_initialized()
    deadline = time.monotonic() + 600
    while tuner.undecided and time.monotonic() < deadline:
        one.turns(8, times)
        time.sleep(0.005)
    assert tuner.undecided == 0
    assert one.native.decided == "eng2:"
    (selection,) = one.committer.selections
    assert selection.winner.candidate.text == "eng2:"
    assert {t.candidate.text for t in selection.ranking} == {f"eng{i}:" for i in range(4)}
    (slow,) = (t for t in selection.ranking if t.candidate.text == "eng1:")
    assert "times the best" in slow.eliminated
    assert one.schedule.leader() == 2
    assert torch.cuda.is_initialized() == was_initialized
    tuner.stop()


@pytest.mark.search
def test_a_first_that_is_wrong_is_not_decided() -> None:
    one = Undecided()
    one.join(candidate("eng1:", 1), candidate("eng2:", 2))
    times = [0.5, 1.0, 1.1]
    one.turns(9, times)
    one.prepared.first_fails = "wrong"
    one.prepared.is_over = True
    assert one.trial.step()
    assert 0 not in one.turns(10, times)
    steps = 0
    while one.trial.step():
        one.turns(10, times)
        steps += 1
        assert steps < 300
    assert one.native.decided == "eng1:"
    (selection,) = one.committer.selections
    assert {t.candidate.text: t.eliminated for t in selection.ranking}["eng0:"] == "wrong"


@pytest.mark.search
def test_trials_without_callers_are_dropped_at_once_and_leave_nothing() -> None:
    """A thread that lived for one step, a plan cache that was full, another epoch."""
    tuner = OnlineTuner()
    others = [Undecided() for _ in range(3)]
    committers = [one.committer for one in others]
    alive = [weakref.ref(one.trial) for one in others]
    races = [weakref.ref(one.trial.race) for one in others]
    stays = Undecided()
    for one in (*others, stays):
        one.join(candidate("eng1:", 1))
        one.turns(8, [1.0, 1.1])
        tuner.add(one.trial)
    before_s = tuner.cpu_s
    assert tuner.undecided == 4
    others.clear()
    del one
    deadline = time.monotonic() + 600
    while any(trial() is not None for trial in alive) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert tuner.undecided == 1
    assert [trial() for trial in (*alive, *races)] == [None] * 6
    assert all(committer.selections == [] for committer in committers)
    assert tuner.cpu_s > before_s
    assert stays.native.decided is None
    tuner.stop()


# What the calls prepare: all but the GPU's part


class Steps(OnlinePreparation):
    """Candidates that need no cuDNN; each piece takes a millisecond of a clock that is not real."""

    others = tuple(candidate(f"eng{i}:", i) for i in range(1, 5))

    def _offered(self, tensors: object) -> list[Candidate]:
        self._search = cast("_C.EngineList", object())
        return [self._first, *self.others]

    def _build(self, candidate: Candidate) -> _C.Plan:
        return plan_of(candidate.text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0, 1e-3)
    monkeypatch.setattr(online_calls.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(checking, "begin", lambda *args: checking.OutputCheck(0.0))


def prepare(budget_ms: float | None) -> tuple[Prepared, int]:
    """All pieces, and after how many calls nothing was left to do."""
    problem = ConvProblem("fprop", (1, 8, 8, 8), (8, 8, 3, 3), padding=1)
    decision = Decision(problem, Policy("online"), Selection((Measurement(FIRST, None, 0),), 0))
    first = Choice(decision, 0)
    prepared = Prepared()
    preparation = Steps(
        first, FIRST, plan_of(FIRST.text), prepared, Online().shortlist, budget_ms=budget_ms
    )
    tensors = (torch.empty(0),) * 3
    for calls in range(1, 20):
        if preparation(*tensors)[1] == 0:
            assert prepared.is_over
            return prepared, calls
    raise AssertionError("it does not end")


@pytest.mark.search
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("budget_ms", "join"), [(None, 4), (1e6, 4), (0.5, 0), (1.5, 0), (2.5, 1), (3.5, 2), (5.5, 4)]
)
def test_the_budget_bounds_what_calls_wait_for(budget_ms: float | None, join: int) -> None:
    """A millisecond to ask, one for the first, one for each of the others."""
    prepared, _ = prepare(budget_ms)
    assert [c.text for c in prepared.joining] == [c.text for c in Steps.others[:join]]
    assert prepared.remarks == (
        [f"the budget left {4 - join} of 5 candidates unseen"] if join < 4 else []
    )
    assert prepared.budget_ms == (budget_ms if join < 4 else None)


@pytest.mark.search
def test_the_evidence_says_that_the_budget_was_spent() -> None:
    one = Undecided()
    one.join(candidate("eng1:", 1))
    one.turns(400, [1.0, 1.2])
    one.prepared.remarks.append("the budget was spent")
    one.prepared.budget_ms = 5.0
    one.prepared.is_over = True
    assert not one.trial.step()
    (selection,) = one.committer.selections
    assert selection.evidence.remarks == ("the budget was spent",)
    assert (selection.evidence.budget_ms, selection.evidence.regret_bound) == (5.0, None)
    alone = Undecided()
    alone.prepared.remarks.append("the budget was spent")
    alone.prepared.is_over = True
    assert not alone.trial.step()
    assert alone.native.decided == FIRST.text
    (selection,) = alone.committer.selections
    assert (selection.winner.candidate, selection.total_samples) == (FIRST, 0)
    assert selection.evidence.remarks == ("the budget was spent",)


@pytest.mark.search
def test_a_trial_ends_with_its_callers_and_they_let_go_of_its_plans() -> None:
    """Here the last reference is dropped; the thread's own keep no plan alive."""

    class Step:
        def __call__(self, *tensors: torch.Tensor) -> tuple[None, int]:
            return None, 0

    preparation = Step()
    alive = weakref.ref(preparation)
    native = _C.OnlineTrial(plan_of(OWN_PATH.text), preparation)
    trial = Trial(native.schedule, OWN_PATH, Committed(), Prepared())
    del preparation
    assert alive() is not None
    assert trial.step()
    del native
    assert alive() is None
    assert not trial.schedule.is_in_use
    assert not trial.step()


@pytest.mark.search
def test_where_all_have_failed_pytorchs_own_path_serves() -> None:
    one = Undecided()
    one.trial.race.fail(0, "failed")
    one.trial.end_undecided()
    (selection,) = one.committer.selections
    assert selection.winner.candidate == OWN_PATH
    assert one.native.decided == OWN_PATH.text


@pytest.mark.search
def test_where_the_first_has_failed_the_best_of_the_others_serves() -> None:
    one = Undecided()
    second = candidate("eng1:", 1)
    one.join(second)
    assert one.trial.step()
    one.trial.end_undecided()
    assert one.native.decided == FIRST.text
    assert one.committer.selections == [], "the first stays, and so does what was said of it"
    one.schedule.fail(0)
    assert one.trial.step()
    one.trial.end_undecided()
    assert one.native.decided == second.text
    (selection,) = one.committer.selections
    assert selection.winner.candidate == second
