"""``online``'s beliefs: turns go in, a choice comes out; no GPU has a part in it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from simulations import GPU, candidate, engine, timer_of

from cudnn_autotune import sampling
from cudnn_autotune._extension import _C
from cudnn_autotune.engines import ATEN, Candidate
from cudnn_autotune.offline import simulated
from cudnn_autotune.offline.simulated import SimulatedEngine, StaticCandidates
from cudnn_autotune.sampling.online import OnlineRace, offered
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.selection import Selection
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.ties import TIE_WIDTH
from cudnn_autotune.unlisted import MATMUL

NOISE = 0.01
MOST_ROUNDS = 250


class Calls:
    """Turns of candidates of known times, in rounds, as csrc/online_trial.cpp gives them."""

    def __init__(self, race: OnlineRace, times_ms: Sequence[float], seed: int = 0) -> None:
        self.race = race
        self.times_ms = list(times_ms)
        self.rounds = 0
        self._random = random.Random(seed)

    def round(self, disturbance: float = 0.0, noise: float = NOISE) -> None:
        order = sorted(self.race.active)
        self._random.shuffle(order)
        self.race.add(
            (i, self.rounds, self.times_ms[i] * math.exp(disturbance + self._noise(noise)))
            for i in order
        )
        self.rounds += 1

    def decide(self, disturbed: Callable[[], float] = lambda: 0.0, noise: float = NOISE) -> int:
        for _ in range(MOST_ROUNDS):
            self.round(disturbed(), noise)
            chosen = self.race.judge()
            if chosen is not None:
                return chosen
        raise AssertionError(f"undecided after {MOST_ROUNDS} rounds")

    def _noise(self, sigma: float) -> float:
        return self._random.gauss(0, sigma)


def race_of(count: int) -> OnlineRace:
    return OnlineRace([candidate(f"c{i}", i) for i in range(count)])


# The race


def test_nothing_is_believed_of_no_turns() -> None:
    race = race_of(3)
    assert race.judge() is None
    assert race.leader() is None
    race.add([(0, 0, 1.0)])
    assert race.judge() is None, "the others have had no turn"
    assert race.active == {0, 1, 2}


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


def test_a_few_spoilt_turns_do_not_decide() -> None:
    race = race_of(2)
    calls = Calls(race, [1.0, 1.05])
    for _ in range(3):
        calls.round()
    race.add([(0, calls.rounds, 20.0), (1, calls.rounds, 1.05)])
    calls.rounds += 1
    race.judge()
    assert 0 in race.active
    assert calls.decide() == 0


def test_the_slow_are_dropped_after_two_turns() -> None:
    race = race_of(3)
    calls = Calls(race, [1.0, 2.0, 1.02])
    calls.round()
    race.judge()
    assert race.active == {0, 1, 2}, "one turn may have been disturbed"
    calls.round()
    race.judge()
    assert race.active == {0, 2}
    assert "times the best" in race.cut[1]
    assert calls.decide() == 0
    slow = {t.candidate.text: t for t in race.selection(0).ranking}["c1"]
    assert slow.samples == 2
    assert slow.time_ms == pytest.approx(2.0, rel=0.05)
    assert slow.cut == race.cut[1]


def test_one_slow_turn_drops_nobody() -> None:
    race = race_of(2)
    race.add([(0, 0, 1.0), (1, 0, 9.0), (0, 1, 1.0), (1, 1, 1.01)])
    race.judge()
    assert race.active == {0, 1}


@pytest.mark.parametrize("at_once", [True, False])
def test_the_order_of_joins_does_not_matter(at_once: bool) -> None:
    """The fast one joins last, when the others have long been told apart."""
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


def test_who_joins_takes_part_before_anything_is_decided() -> None:
    race = race_of(2)
    calls = Calls(race, [1.0, 1.3])
    for _ in range(30):
        calls.round()
    race.join([candidate("c2", 2)])
    calls.times_ms.append(0.9)
    assert race.judge() is None
    assert calls.decide() == 2


def test_failures_leave_the_race() -> None:
    race = race_of(3)
    calls = Calls(race, [1.0, 1.02, 1.04])
    for _ in range(4):
        calls.round()
    race.judge()
    race.fail(0, "failed")
    assert race.leader() == 1
    assert calls.decide() == 1
    selection = race.selection(1)
    assert {t.candidate.text: t.cut for t in selection.ranking}["c0"] == "failed"
    assert "c0" not in selection.evidence.tied


def test_all_failed_is_no_choice() -> None:
    race = race_of(2)
    calls = Calls(race, [1.0, 1.1])
    calls.round()
    for number in (0, 1):
        race.fail(number, "failed")
    assert race.judge() is None
    assert race.leader() is None
    assert race.next_best() is None


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


def test_one_that_is_left_is_chosen() -> None:
    race = race_of(2)
    calls = Calls(race, [1.0, 1.1])
    race.fail(0, "failed")
    assert calls.decide() == 1
    assert race.selection(1).evidence.regret_bound == 0


def test_times_of_zero_are_no_times() -> None:
    race = race_of(2)
    race.add([(0, r, 0.0) for r in range(10)])
    race.add([(1, r, 1.0) for r in range(10)])
    assert race.judge() is None
    assert race.turns == 20


def test_samples_may_come_late_and_in_any_order() -> None:
    samples = [
        (i, r, [1.0, 1.05][i] * (1 + 0.002 * ((r * 7 + i) % 5))) for r in range(12) for i in (0, 1)
    ]
    random.Random(1).shuffle(samples)
    race = race_of(2)
    for begin in range(0, len(samples), 3):
        race.add(samples[begin : begin + 3])
    assert race.judge() == 0


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


def test_the_bound_covers() -> None:
    """In at least 95 % of races over close rivals, at 95 % confidence."""
    covered = 0
    races = 60
    for seed in range(races):
        times = [1.0, 1.004, 1.008, 1.03]
        random.Random(seed).shuffle(times)
        race = race_of(len(times))
        chosen = Calls(race, times, seed).decide()
        bound = race.selection(chosen).evidence.regret_bound
        assert bound is not None
        assert times[chosen] - 1 <= 0.02
        covered += times[chosen] - 1 <= bound + 1e-12
    assert covered >= 0.95 * races


def test_it_ends_though_nothing_can_be_told_apart() -> None:
    race = race_of(4)
    calls = Calls(race, [1.0, 1.0, 1.003, 1.006])
    chosen = calls.decide(noise=0.3)
    assert calls.rounds <= 200
    bound = race.selection(chosen).evidence.regret_bound
    assert bound is not None
    assert bound > TIE_WIDTH, "it does not claim what it does not know"


def test_it_waits_for_the_rounds_that_its_rules_ask_for() -> None:
    race = OnlineRace([candidate("a"), candidate("b", 1)], RaceRules(least_rounds=25))
    calls = Calls(race, [1.0, 1.2])
    calls.decide()
    assert calls.rounds == 25


def test_a_selection_survives_json() -> None:
    race = OnlineRace([candidate("a", 0, 5, "RUNTIME_COMPILATION"), candidate("b", 1), ATEN])
    calls = Calls(race, [1.0, 2.5, 1.002])
    race.join([candidate("never-ran", 3)])
    race.fail(3, "failed")
    chosen = calls.decide()
    selection = race.selection(chosen, 12.5, ["a remark"])
    stored = json.loads(json.dumps(selection.to_json(), allow_nan=False))
    assert Selection.from_json(stored) == selection
    assert selection.evidence.wall_ms == 12.5
    assert selection.evidence.remarks == ("a remark",)
    assert selection.total_samples == race.turns
    assert selection.evidence.gpu_ms > 0
    for timed in selection.ranking:
        if timed.low_ms is not None:
            assert timed.time_ms is not None
            assert timed.high_ms is not None
            assert timed.low_ms <= timed.time_ms <= timed.high_ms
    never = {t.candidate.text: t for t in selection.ranking}["never-ran"]
    assert (never.time_ms, never.samples, never.cut) == (None, 0, "failed")


# Who takes part


def listed(*candidates: Candidate, aten_uses_cudnn: bool = True) -> StaticCandidates:
    return StaticCandidates(list(candidates), aten_uses_cudnn)


def test_the_last_resorts_are_not_offered() -> None:
    a, b = candidate("a"), replace(candidate("b", 1), heuristic_mode="B")
    fallback = replace(candidate("f", 2), heuristic_mode="FALLBACK")
    assert offered(listed(a, b, fallback, ATEN)) == [a]
    assert offered(listed(a, b, ATEN, MATMUL, aten_uses_cudnn=False)) == [a, ATEN, MATMUL]


def test_the_limit_is_of_cudnns_engines() -> None:
    engines = [candidate(f"c{i}", i) for i in range(5)]
    everyone = listed(*engines, ATEN, aten_uses_cudnn=False)
    assert offered(everyone, 2) == [*engines[:2], ATEN]
    assert offered(everyone) == [*engines, ATEN]


# The mode over a timer, as audits run it


def select(timer: simulated.SimulatedTimer, limits: Limits | None = None) -> Selection | None:
    return sampling.get("online").select(timer.candidates, timer, limits or Limits())


@pytest.mark.parametrize("name", simulated.preset_names())
def test_presets(name: str) -> None:
    regrets = []
    for seed in range(3):
        timer = simulated.preset(name, seed)
        selection = select(timer)
        assert selection is not None
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


@pytest.mark.parametrize("limit", [1, 2])
def test_benchmark_limit(limit: int) -> None:
    engines = [engine(f"e{i}", 1.0 + 0.1 * i) for i in (3, 2, 1, 0)]
    selection = select(timer_of(*engines), Limits(benchmark_limit=limit))
    assert selection is not None
    assert {t.candidate.text for t in selection.ranking} == {"e3", "e2"} - (
        {"e2"} if limit == 1 else set()
    )


def test_one_candidate() -> None:
    selection = select(timer_of(engine("only", 1.0)))
    assert selection is not None
    assert selection.winner.candidate.text == "only"


def test_no_candidate_that_runs() -> None:
    assert select(timer_of(engine("broken", 1.0, builds=False), built=False)) is None


def test_failing_candidates_are_named() -> None:
    failing = engine("failing", 0.5, error="CUDNN_STATUS_EXECUTION_FAILED")
    late = engine("late", 0.9, fails_at_ms=12.0)
    selection = select(timer_of(engine("a", 1.0), failing, late, engine("b", 1.1)))
    assert selection is not None
    assert selection.winner.candidate.text == "a"
    cut = {t.candidate.text: t.cut for t in selection.ranking}
    assert "CUDNN_STATUS_EXECUTION_FAILED" in cut["failing"]
    assert "failed" in cut["late"]


def test_every_candidate_failing_is_no_choice() -> None:
    broken = [engine(text, 1.0, error="CUDNN_STATUS_EXECUTION_FAILED") for text in "ab"]
    assert select(timer_of(*broken)) is None


@pytest.mark.parametrize(
    ("field", "error"),
    [("lost_at_ms", RuntimeError), ("out_of_memory_at_ms", torch.OutOfMemoryError)],
)
def test_a_lost_device_is_a_clear_error(field: str, error: type[Exception]) -> None:
    gpu = replace(GPU, **{field: 6.0})
    engines: list[SimulatedEngine] = [engine("a", 1.0), engine("b", 1.01)]
    with pytest.raises(error, match="CUDA"):
        select(timer_of(*engines, gpu=gpu))


# The trial that carries it out: what can be had of it without calls


class Told:
    """A policy whose problem has nobody but the first."""

    is_wanted = True
    standing: str | None = None

    def __init__(self) -> None:
        self.told: list[Selection] = []

    def open(self) -> _C.EngineSearch:
        raise AssertionError("nothing is built before the second call")

    def others(self, search: _C.EngineSearch) -> Sequence[Candidate]:
        return []

    def is_right(self, candidate: Candidate, plan: _C.Plan | None) -> bool:
        return True

    def tell(self, selection: Selection) -> bool:
        self.told.append(selection)
        return True


@pytest.mark.search
def test_a_problem_that_was_seen_once_costs_nothing() -> None:
    from cudnn_autotune.online_tuner import OnlineTuner, Trial

    trial = Trial(_C.OnlineTrial((ATEN.text, None)), 0, ATEN, Told())
    assert trial.native.is_in_use, "the first call is still under way"
    assert trial.step()
    assert trial.is_idle
    tuner = OnlineTuner()
    tuner.add(trial)
    assert (tuner.undecided, tuner.building) == (1, 1)
    tuner.stop()
    assert tuner._thread is not None
    assert not tuner._thread.is_alive()
    tuner.add(trial)
    assert tuner.undecided == 1, "after its end nothing is added"


@pytest.mark.search
def test_what_was_forgotten_ends() -> None:
    from cudnn_autotune.online_tuner import Trial

    policy = Told()
    trial = Trial(_C.OnlineTrial((ATEN.text, None)), 0, ATEN, policy)
    policy.is_wanted = False
    assert not trial.step()
    assert policy.told == []


@pytest.mark.search
def test_where_all_have_failed_pytorchs_own_path_serves() -> None:
    from cudnn_autotune.online_tuner import Trial

    policy = Told()
    first = candidate("eng0:")
    trial = Trial(_C.OnlineTrial((first.text, None)), 0, first, policy)
    trial.race.fail(0, "failed")
    trial.settle()
    (selection,) = policy.told
    assert selection.winner.candidate == ATEN


@pytest.mark.search
def test_where_the_first_has_failed_the_best_of_the_others_serves() -> None:
    from cudnn_autotune.online_tuner import Trial

    policy = Told()
    first, second = candidate("eng0:"), candidate("eng1:", 1)
    trial = Trial(_C.OnlineTrial((first.text, None)), 0, first, policy)
    trial.race.join([second])
    trial.native.offer([(second.text, None)])
    trial.settle()
    assert policy.told == [], "the first stays, and so does what was said of it"
    trial.race.fail(0, "failed")
    trial.settle()
    (selection,) = policy.told
    assert selection.winner.candidate == second
