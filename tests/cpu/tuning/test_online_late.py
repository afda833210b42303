"""``online``: candidates that join late, as those do that are compiled in the background."""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from concurrent.futures import Future
from typing import cast

import pytest
import torch
from made_up_plans import plan_of
from online_trials import FIRST, NOISE, Calls, Undecided, race_of
from simulation import candidate

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.online import few
from cudnn_autotune.sampling.online_race import TrialRecord
from cudnn_autotune.sampling.ties import TIE_WIDTH
from cudnn_autotune.store import Decision, Policy
from cudnn_autotune.tuning import checking, online_calls
from cudnn_autotune.tuning.checking import Verdict
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.online_calls import OnlinePreparation
from cudnn_autotune.tuning.online_tuner import OnlineTuner, Prepared

# The race


@pytest.mark.parametrize(("slowdown", "late_ms", "wins"), [(2.0, 0.9, 3), (0.4, 1.1, 1)])
def test_times_of_another_clock_do_not_count(slowdown: float, late_ms: float, wins: int) -> None:
    """It joins when the clock has changed, and is compared with what others take now."""
    race = race_of(3)
    calls = Calls(race, [1.05, 1.0, 1.2, late_ms])
    race.settle(calls.decide())
    assert race.active == {1}
    race.join([candidate("c3", 3)])
    assert calls.decide(lambda: math.log(slowdown)) == wins
    assert {m.candidate.text for m in race.selection(wins).ranking} == {"c0", "c1", "c2", "c3"}


def test_those_that_join_one_after_the_other_do_not_hold_up_the_others() -> None:
    race = race_of(3)
    calls = Calls(race, [1.0, 1.3, 1.02])
    for number in range(3, 9):
        race.join([candidate(f"c{number}", number)])
        calls.times_ms.append(1.05)
        calls.round()
        race.judge()
    assert 1 not in race.active, "it was compared with those that were there from the beginning"
    assert race.active >= {0, 2, 8}
    assert calls.decide() == 0


def test_the_leader_is_known_after_a_turn_of_each() -> None:
    race = race_of(3)
    race.add([(0, 0, 1.2), (1, 0, 1.0)])
    assert race.leader() == 1
    race.add([(2, 0, 0.8)])
    assert race.judge() is None
    assert race.leader() == 2
    calls = Calls(race, [1.2, 1.0, 0.8, 0.7])
    calls.rounds = 1
    calls.decide()
    race.join([candidate("c3", 3)])
    assert race.leader() == 2
    race.add([(3, calls.rounds, 0.7)])
    assert race.leader() == 3


def test_a_slow_one_that_joins_late_has_two_turns() -> None:
    race = race_of(2)
    calls = Calls(race, [1.0, 1.01, 2.0])
    race.settle(calls.decide())
    race.join([candidate("c2", 2)])
    calls.decide()
    late = next(m for m in race.selection(0).ranking if m.candidate.text == "c2")
    assert late.samples == 2
    assert "times the best" in late.eliminated


def test_each_that_joins_costs_a_bounded_number_of_rounds() -> None:
    """Fewer than a race of its own: it is compared with the fastest of the others only."""
    race = race_of(4)
    calls = Calls(race, [1.0, 1.003, 1.01, 1.02])
    chosen = calls.decide()
    first, rng = calls.rounds, random.Random(1)
    for number in range(4, 16):
        race.settle(chosen)
        race.join([candidate(f"c{number}", number)])
        calls.times_ms.append(rng.uniform(0.99, 1.2))
        before = calls.rounds
        chosen = calls.decide()
        assert calls.rounds - before <= race.rules.most_rounds
    assert calls.rounds <= first + 12 * 60
    assert calls.times_ms[chosen] <= (1 + 2 * TIE_WIDTH) * min(calls.times_ms)


def test_the_bound_covers_those_that_gave_way() -> None:
    covered, races = 0, 40
    for seed in range(races):
        times = [1.0, 1.004, 1.006, 1.03]
        random.Random(seed).shuffle(times)
        race = race_of(2)
        calls = Calls(race, times[:2], seed)
        for number in (2, 3):
            race.settle(calls.decide())
            race.join([candidate(f"c{number}", number)])
            calls.times_ms.append(times[number])
        chosen = calls.decide()
        bound = race.selection(chosen).evidence.regret_bound
        assert times[chosen] - 1 <= 0.02
        covered += times[chosen] - 1 <= bound + 1e-12
    assert covered >= 0.95 * races


# The trial


def step(one: Undecided) -> bool:
    return one.trial.step()


@pytest.mark.search
def test_the_fastest_so_far_serves_until_another_one_is_built() -> None:
    one = Undecided()
    times = [1.2, 1.0, 1.1, 0.9]
    one.join(candidate("eng1:", 1), candidate("eng2:", 2))
    assert step(one)
    one.turns(90, times)
    assert step(one)
    assert one.trial.race.active == {1}
    for _ in range(50):
        assert one.schedule.take_turn() is None, "nothing is timed"
        assert one.schedule.leader() == 1
        assert step(one)
    assert one.native.decided is None
    one.join(candidate("eng3:", 3))
    one.prepared.is_over = True
    assert step(one)
    turns = 0
    while step(one):
        assert set(one.turns(2, times)) <= {1, 3}
        turns += 2
        assert turns < 200
    assert one.native.decided == "eng3:"
    (selection,) = one.committer.selections
    assert selection.winner.candidate.text == "eng3:"
    assert len(selection.ranking) == 4


@pytest.mark.search
def test_if_nothing_else_can_be_built_the_fastest_so_far_is_chosen() -> None:
    one = Undecided()
    one.join(candidate("eng1:", 1))
    one.turns(60, [1.2, 1.0])
    assert step(one)
    assert one.native.decided is None
    one.prepared.is_over = True
    assert not step(one)
    assert one.native.decided == "eng1:"


@pytest.mark.search
def test_one_that_joins_meanwhile_is_not_kept_waiting() -> None:
    """It joins between the thread's look at the trial and its word that all wait."""
    one = Undecided()
    one.join(candidate("eng1:", 1))
    one.turns(60, [1.2, 1.0])
    one.schedule.rest(1)
    assert any([one.schedule.take_turn() for _ in range(4)])
    one.schedule.rest(2)
    assert not any([one.schedule.take_turn() for _ in range(4)])
    one.join(candidate("eng2:", 2))
    assert any([one.schedule.take_turn() for _ in range(4)])


@pytest.mark.search
def test_those_that_gave_way_serve_where_the_fastest_fails() -> None:
    one = Undecided()
    one.join(candidate("eng1:", 1), candidate("eng2:", 2))
    times = [1.2, 1.0, 1.1]
    one.turns(90, times)
    assert step(one)
    assert one.trial.race.active == {1}
    assert one.schedule.fail(1)
    assert one.schedule.leader() in (0, 2)
    one.prepared.is_over = True
    while step(one):
        assert set(one.turns(2, times)) <= {0, 2}
    assert one.native.decided == "eng2:"


@pytest.mark.search
@pytest.mark.parametrize("compiled_after", [40, 200, 400])
def test_five_hundred_calls_are_enough(compiled_after: int) -> None:
    """With 28 candidates of mode A and 9 that are compiled, of which one is the fastest by far: the
    calls after them take hardly longer than the fastest candidate."""
    ratios = []
    for seed in range(6):
        one, rng = Undecided(), random.Random(seed)
        quick = [1.15, *(1 + abs(rng.gauss(0, 0.25)) for _ in range(27))]
        times = [*quick, 0.75, *(0.75 + abs(rng.gauss(0, 0.2)) for _ in range(8))]
        joins = [3 + i for i in range(27)] + [compiled_after + 8 * i for i in range(9)]
        taken = 0.0
        for call in range(560):
            while joins and call >= joins[0]:
                number = len(times) - len(joins)
                one.join(candidate(f"eng{number}:", number))
                del joins[0]
            one.prepared.is_over = not joins
            runs = one.schedule.leader()
            if one.native.decided is not None:
                runs = int(one.native.decided[3:-1])
            elif turn := one.schedule.take_turn():
                runs, round_ = turn
                one.schedule.report(runs, round_, times[runs] * math.exp(rng.gauss(0, NOISE)))
            if one.native.decided is None and call % 2:
                step(one)
            taken += times[runs] if call >= 500 else 0.0
        ratios.append(taken / 60 / min(times))
    assert sum(ratios) / len(ratios) <= 1.01
    assert max(ratios) <= 1.03


# The preparation: a compiled candidate is a future, whose plan some thread makes


class Compiles(OnlinePreparation):
    """Candidates that need no cuDNN: two that are built at once, three that are compiled."""

    quick = tuple(candidate(f"eng{i}:", i) for i in (1, 2))
    compiled = tuple(candidate(f"eng{i}:", i, 0, "RUNTIME_COMPILATION") for i in (3, 4, 5))

    def _offered(self, tensors: object) -> list[Candidate]:
        self._search = cast("_C.EngineSearch", object())
        self.futures: dict[str, Future[_C.Plan]] = {c.text: Future() for c in self.compiled}
        return [*self.compiled, self._first, *self.quick]

    def _build(self, candidate: Candidate) -> _C.Plan:
        return plan_of(candidate.text)

    def _compile(self, candidate: Candidate) -> Future[_C.Plan]:  # type: ignore[override]
        return self.futures[candidate.text]


TENSORS = (torch.empty(0),) * 3


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "begin", lambda *args: checking.Verdict(0.0))


def preparation(
    budget_ms: float | None = None,
    earlier: TrialRecord | None = None,
    limit: int | None = None,
) -> tuple[Compiles, Prepared]:
    problem = ConvProblem("fprop", (1, 8, 8, 8), (8, 8, 3, 3), padding=1)
    decision = Decision(
        problem, Policy("online", limit), Selection((Measurement(FIRST, None, 0),), 0)
    )
    prepared = Prepared()
    first = (Choice(decision, 0), FIRST, plan_of(FIRST.text))
    return Compiles(*first, prepared, few, (), budget_ms, earlier), prepared


def steps(one: Compiles) -> tuple[list[str], int]:
    """Takes steps until one need not follow at once; returns who has joined, and after how many
    calls the next one follows."""
    joined = []
    for _ in range(30):
        joins, next_ = one(*TENSORS)
        joined += [joins.text] if joins else []
        if next_ != 1:
            return joined, next_
    raise AssertionError("it does not end")


@pytest.mark.search
@pytest.mark.usefixtures("right")
def test_what_is_compiled_joins_once_it_is_and_no_call_waits() -> None:
    one, prepared = preparation()
    joined, next_ = steps(one)
    assert joined == ["eng1:", "eng2:"]
    assert next_ == online_calls._CALLS_BETWEEN_LOOKS
    assert not prepared.is_over
    assert steps(one) == ([], next_)
    one.futures["eng4:"].set_result(plan_of("eng4:"))
    assert steps(one) == (["eng4:"], next_)
    one.futures["eng3:"].set_exception(RuntimeError("no compiler"))
    assert steps(one) == ([], next_)
    assert not prepared.is_over
    one.futures["eng5:"].set_result(plan_of("eng5:"))
    assert steps(one) == (["eng5:"], 0)
    assert prepared.is_over
    assert not prepared.is_broken
    assert [c.text for c in prepared.joining] == ["eng1:", "eng2:", "eng4:", "eng5:"]


@pytest.mark.search
@pytest.mark.usefixtures("right")
def test_a_plan_that_needs_more_workspace_than_the_limit_does_not_join(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was listed may say less than the plan, which is known later."""
    one, _ = preparation(limit=99)
    with caplog.at_level(logging.INFO):
        one(*TENSORS)
        for text, future in one.futures.items():
            future.set_result(plan_of(text, workspace_bytes=99 if text == "eng4:" else 100))
        assert steps(one)[0] == ["eng1:", "eng2:", "eng4:"]
    assert "eng3: is left out: it needs 100 bytes of workspace" in caplog.text


class Later(Verdict):
    """A verdict that the GPU still computes."""

    is_ready = False


@pytest.mark.search
def test_no_call_waits_for_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: dict[str, Later] = {}

    def begin(problem: object, text: str, *rest: object) -> Later:
        return checks.setdefault(text, Later(0.5 if text == "eng1:" else 0.0))

    monkeypatch.setattr(checking, "begin", begin)
    one, prepared = preparation()
    for text, future in (one(*TENSORS), one.futures)[1].items():
        future.set_result(plan_of(text))
    for _ in range(9):
        assert one(*TENSORS) == (None, 1)
    assert list(checks) == [FIRST.text, "eng1:", "eng2:", "eng3:"], "so many at once"
    checks["eng1:"].is_ready = checks["eng2:"].is_ready = True
    assert one(*TENSORS) == (None, 1), "the first is checked before all others"
    checks[FIRST.text].is_ready = True
    joined = [joins.text for joins, _ in (one(*TENSORS) for _ in range(6)) if joins]
    assert joined == ["eng2:"]
    assert prepared.first_fails == ""
    assert [text for text, _ in prepared.checks.rejected] == ["eng1:"]
    assert not prepared.is_over
    for check in checks.values():
        check.is_ready = True
    assert steps(one) == (["eng3:", "eng4:", "eng5:"], 0)
    assert prepared.is_over


@pytest.mark.search
@pytest.mark.usefixtures("right")
def test_without_threads_the_others_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, candidate: Candidate) -> Future[None]:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Compiles, "_compile", refuse)
    one, prepared = preparation()
    assert steps(one) == (["eng1:", "eng2:"], 0)
    assert prepared.is_over
    assert not prepared.is_broken


@pytest.mark.search
@pytest.mark.usefixtures("right")
def test_what_nobody_waits_for_any_more_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, _ = preparation()
    steps(one)
    futures = one.futures
    futures["eng3:"].set_running_or_notify_cancel()
    del one
    assert [f.cancelled() for f in futures.values()] == [False, True, True]
    seconds = itertools.count(0.0, 1e-3)
    monkeypatch.setattr(online_calls.time, "perf_counter", lambda: next(seconds))
    one, prepared = preparation(budget_ms=3.5)
    steps(one)
    assert all(f.cancelled() for f in one.futures.values())
    assert prepared.remarks == ["the budget left 3 of 6 candidates unseen"]


# A trial whose candidates are compiled on a thread, while calls go on


@pytest.mark.search
@pytest.mark.usefixtures("right")
def test_a_compiled_one_that_is_fastest_wins_while_calls_go_on() -> None:
    one = Undecided()
    prepare, one.trial.prepared = preparation()
    one.prepared = one.trial.prepared
    times = {FIRST.text: 1.3, "eng1:": 1.1, "eng2:": 1.2, "eng3:": 2.0, "eng4:": 0.8, "eng5:": 0.82}

    def compile_all() -> None:
        while not hasattr(prepare, "futures"):
            time.sleep(0.001)
        for text, future in prepare.futures.items():
            time.sleep(0.15)
            future.set_result(plan_of(text))

    thread = threading.Thread(target=compile_all)
    thread.start()
    tuner = OnlineTuner()
    tuner.add(one.trial)
    names, rng, next_at = [FIRST.text], random.Random(0), 0
    deadline = time.monotonic() + 600
    for call in itertools.count():
        if call == next_at:
            joins, next_ = prepare(*TENSORS)
            next_at = call + next_ if next_ else -1
            if joins:
                one.native.join(joins)
                names.append(joins.text)
        if turn := one.schedule.take_turn():
            implementation, round_ = turn
            time_ms = times[names[implementation]] * math.exp(rng.gauss(0, NOISE))
            one.schedule.report(implementation, round_, time_ms)
        if not tuner.undecided:
            break
        time.sleep(0.0005)
        assert time.monotonic() < deadline
    thread.join()
    tuner.stop()
    assert one.native.decided == "eng4:"
    (selection,) = one.committer.selections
    assert {m.candidate.text for m in selection.ranking} == times.keys()
    assert all(m.samples >= 2 for m in selection.ranking)
