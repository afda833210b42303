"""Stopping criteria: what is enough for a race, a sustained run and a steady-state final."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from simulation import candidate, engine, timer_of

from cudnn_autotune.audit.oracle import RunCriterion
from cudnn_autotune.sampling.racing import LeadCriterion, RaceCriterion, RaceRules, Standings
from cudnn_autotune.sampling.steady_final import FinalCriterion, FinalRules, SteadyLog, SteadyTimes
from cudnn_autotune.sampling.strategy import Budget, Limits
from cudnn_autotune.sampling.sustained_run import SteadyCriterion
from cudnn_autotune.timers.stopping_criterion import Reason
from cudnn_autotune.timers.timer import Cache, Sample

A, B = candidate("a"), candidate("b", 1)
RULES = RaceRules(tie_width=0.005, least_rounds=6, most_rounds=40, gpu_ms=100.0)


def standings(
    rounds: int, behind: float, half_width: float = 0.002, **fields: float
) -> Standings[str]:
    widths = dict.fromkeys("ab", half_width)
    return Standings(["a", "b"], {"a": 0.0, "b": behind}, widths, rounds, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rounds", "behind", "reason"),
    [
        (5, 0.01, None),  # too few rounds
        (6, 0.01, Reason.DECIDED),
        (6, -0.0, Reason.DECIDED),  # b may lead by 0.002 at most: a tie
        (6, -0.004, Reason.DECIDED),
    ],
)
def test_a_lead_decides(rounds: int, behind: float, reason: Reason | None) -> None:
    criterion = LeadCriterion(RULES)
    assert not criterion.is_finished()
    criterion.add_measurement(standings(rounds, behind))
    assert criterion.reason is reason
    assert criterion.is_finished() == (reason is not None)


def test_what_was_decided_is_open_again_after_another_measurement() -> None:
    criterion = LeadCriterion(RULES)
    criterion.add_measurement(standings(8, 0.01))
    assert criterion.is_finished()
    criterion.add_measurement(standings(9, 0.001, half_width=0.02))
    assert not criterion.is_finished()
    criterion.add_measurement(standings(40, 0.001, half_width=0.02))
    assert criterion.reason is Reason.LIMIT


def budget(budget_ms: float | None = None) -> Budget:
    return Budget(timer_of(engine("any", 1.0)), Limits(budget_ms=budget_ms))


def test_a_race_ends_with_one_survivor_or_with_its_gpu_time() -> None:
    race = RaceCriterion(RULES, budget())
    race.add_measurement(Standings(["a"], {"a": 0.0}, {"a": 0.5}, rounds=2))
    assert race.reason is Reason.DECIDED
    open_ = {"behind": 0.001, "half_width": 0.05}
    race = RaceCriterion(RULES, budget())
    race.add_measurement(standings(4, gpu_ms=99.0, **open_))
    assert not race.is_finished()
    race.add_measurement(standings(5, gpu_ms=251.0, **open_))
    assert race.reason is Reason.LIMIT, "250 calls of 1 ms"


def test_a_disturbed_race_takes_more_rounds() -> None:
    for rounds, reason in ((6, None), (17, None), (18, Reason.DECIDED)):
        race = RaceCriterion(RULES, budget())
        race.add_measurement(standings(rounds, 0.01, disturbed=2))
        assert race.reason is reason


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([1.0], None),
        ([1.0, 1.003], Reason.DECIDED),
        ([1.0, 1.01], None),
        ([1.0, 1.04, 1.08], None),  # it still falls
        ([1.0, 1.06, 1.065], Reason.DECIDED),  # one step
        ([1.0, 1.06, 1.05, 1.06], Reason.DECIDED),  # hunting
        ([1.0, 1.06, 1.085, 1.11], None),
    ],
)
def test_a_sustained_run_is_steady(chunks: Sequence[float], reason: Reason | None) -> None:
    criterion = SteadyCriterion(40, math.inf, is_patient=True)
    criterion.add_measurement(chunks)
    assert criterion.reason is reason
    impatient = SteadyCriterion(40, math.inf, is_patient=False)
    impatient.add_measurement(chunks)
    assert impatient.reason is Reason.DECIDED


def test_a_sustained_run_that_never_settles_ends() -> None:
    criterion = SteadyCriterion(40, math.inf, is_patient=True)
    chunks = 0
    while not criterion.is_finished():
        criterion.add_measurement([1.05**chunks])
        chunks += 1
    assert criterion.reason is Reason.LIMIT
    assert sum(criterion.chunks) * 40 <= 1000.0 + criterion.chunks[-1] * 40
    short = SteadyCriterion(40, 100.0, is_patient=True)
    short.add_measurement([1.0, 1.05])
    assert short.reason is Reason.LIMIT, "a third chunk would end after 100 ms"


def times(of_b: float, sigma: float = 0.001) -> SteadyTimes:
    logs = {A: [SteadyLog(0.0, sigma)] * 2, B: [SteadyLog(of_b, sigma)] * 2}
    return SteadyTimes(logs=logs, finalists=[A, B])


def test_a_final_ends_once_one_leads() -> None:
    rules = FinalRules(passes=2, confident=2.0, precise=0.0)
    final = FinalCriterion(rules, lambda: True)
    final.add_measurement(times(0.5))
    assert not final.is_finished(), "a first pass is held in any case"
    final.add_measurement(times(0.5))
    assert final.reason is Reason.DECIDED
    final = FinalCriterion(rules, lambda: True)
    for reason in (None, None, Reason.LIMIT):
        final.add_measurement(times(0.0, 0.02))
        assert final.reason is reason


def test_a_run_ends_once_its_thirds_agree_in_every_cache_state() -> None:
    def portion(cold_ms: float, hot_ms: float = 1.0) -> list[tuple[Cache, Sample]]:
        return [("cold", Sample(cold_ms)), ("hot", Sample(hot_ms))] * 5

    criterion = RunCriterion(calls=100, least_ms=1000.0, most_ms=1e6, tolerance=0.003)
    for cold_ms in (1.0, 1.2, 1.2):  # the last third agrees with the one before
        assert not criterion.is_finished()
        criterion.add_measurement(portion(cold_ms))
    assert criterion.reason is Reason.DECIDED
    criterion = RunCriterion(calls=100, least_ms=1000.0, most_ms=1e6, tolerance=0.003)
    for hot_ms in (1.0, 1.0, 1.2):  # one cache state is steady, the other is not
        criterion.add_measurement(portion(1.2, hot_ms))
        assert not criterion.is_finished()


def test_a_run_is_neither_too_short_nor_too_long() -> None:
    criterion = RunCriterion(calls=1, least_ms=600.0, most_ms=700.0, tolerance=0.003)
    criterion.add_measurement([("cold", Sample(1.0))] * 599)
    assert not criterion.is_finished()
    criterion.add_measurement([("cold", Sample(1.0))])
    assert criterion.reason is Reason.DECIDED
    criterion = RunCriterion(calls=1, least_ms=600.0, most_ms=700.0, tolerance=0.003)
    criterion.add_measurement([("cold", Sample(1.0 + 0.01 * i)) for i in range(400)])
    assert criterion.reason is Reason.LIMIT
