"""``online``: candidates that join late, as those do that are compiled in the background."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest
import torch
from support.conv.problems import make
from support.processes.subprocesses import IMPORTS, PACKAGE_PARENT, python
from support.simulation import candidate
from support.tuning.made_up_plans import plan_of
from support.tuning.online_trials import FIRST, NOISE, Calls, Undecided, race_of

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines import devices
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.online import preparation as online_calls
from cudnn_autotune.online.preparation import OnlinePreparation
from cudnn_autotune.online.race import KeptTurns, OnlineRace, TrialRecord
from cudnn_autotune.online.tuner import OnlineTuner, Prepared
from cudnn_autotune.sampling.auto import few
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import kept_plans
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import checking
from cudnn_autotune.tuning.checking import OutputCheck
from cudnn_autotune.tuning.choice import Choice

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
        self._search = cast("_C.EngineList", object())
        self.futures: dict[str, Future[_C.Plan]] = {c.text: Future() for c in self.compiled}
        return [*self.compiled, self._first, *self.quick]

    def _build(self, candidate: Candidate) -> _C.Plan:
        return plan_of(candidate.text)

    def _compile(self, candidate: Candidate) -> Future[_C.Plan]:  # type: ignore[override]
        return self.futures[candidate.text]


TENSORS = (torch.empty(0),) * 3


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "begin", lambda *args: checking.OutputCheck(0.0))


def preparation(
    budget_ms: float | None = None, earlier: TrialRecord | None = None, limit: int | None = None
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


class Later(OutputCheck):
    """A check that the GPU still computes."""

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


# ``online``: a trial that the end of a process interrupts goes on in the next one

GPU = devices.load("h200")
PROBLEM = make("resnet_fp16_nhwc").text
TIMES = {"c0": 1.4, "c1": 1.012, "c2": 1.0, "c3": 1.02, "c4": 1.9}


def read_back(record: TrialRecord) -> TrialRecord:
    """As the next process sees it."""
    return TrialRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))


def next_race(earlier: TrialRecord) -> tuple[OnlineRace, Calls]:
    """The race of a process that goes on with a record; c0 serves first."""
    candidates = [candidate(text, i) for i, text in enumerate(TIMES)]
    others = sorted(candidates[1:], key=earlier.place)
    race = OnlineRace([candidates[0]], earlier=earlier)
    race.join([c for c in others if not earlier.is_out(c.text)])
    return race, Calls(race, [TIMES[c.text] for c in race.candidates], seed=earlier.rounds)


# The record


def test_a_record_holds_what_takes_part_and_why_others_do_not() -> None:
    race, calls = next_race(TrialRecord())
    for _ in range(3):
        calls.round()
    race.judge()
    record = race.record()
    assert next(c.text for c in record.candidates if not c.eliminated) in ("c1", "c2", "c3")
    assert record.rounds == 3
    assert record.is_out("c4")
    assert not record.is_out("c2")
    assert not record.is_out("unheard-of")
    again = read_back(record)
    assert list(again.by_text) == list(record.by_text)
    for one, other in zip(record.candidates, again.candidates, strict=True):
        assert other.times_ms == pytest.approx(one.times_ms, rel=1e-4)
        assert (other.eliminated, other.samples) == (one.eliminated, one.samples)


def test_failures_are_tried_again() -> None:
    """The memory that one lacked may be there in the next process."""
    race, calls = next_race(TrialRecord())
    calls.round()
    race.fail(2, "failed")
    assert "c2" not in race.record().by_text


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        {"candidates": {}},
        {"candidates": [{"text": "a", "times_ms": [1.0, "x"]}]},
        {"candidates": [{"text": "a", "times_ms": [-1.0]}]},
        {"candidates": [], "regret_bound": "none"},
        {"version": 7},
    ],
)
def test_what_is_no_record_is_an_error(tree: object) -> None:
    with pytest.raises(ValueError, match="TrialRecord"):
        TrialRecord.from_json(tree)


# Processes that are too short to decide


@pytest.mark.parametrize("seed", range(4))
def test_short_processes_decide_together(seed: int) -> None:
    """Each takes five rounds, and together they take hardly more than one long process."""
    long_race, long_calls = next_race(TrialRecord())
    long_calls._random = random.Random(seed)
    chosen_at_once = long_race.candidates[long_calls.decide()].text
    earlier, rounds = TrialRecord(), 0
    for process in range(60):
        race, calls = next_race(earlier)
        calls._random = random.Random(100 * seed + process)
        for _ in range(5):
            calls.round()
            rounds += 1
            if (chosen := race.judge()) is not None:
                break
        if chosen is not None:
            break
        earlier = read_back(race.record())
    assert chosen is not None
    assert race.candidates[chosen].text == chosen_at_once == "c2"
    assert rounds <= 1.7 * long_calls.rounds + 10
    left_out = [candidate(text, i) for i, text in enumerate(TIMES) if earlier.is_out(text)]
    joined = {c.text for c in race.candidates}
    selection = race.selection(chosen, left_out=[c for c in left_out if c.text not in joined])
    texts = [m.candidate.text for m in selection.ranking]
    assert sorted(texts) == sorted(TIMES)
    for measurement in selection.ranking:
        wanted = TIMES[measurement.candidate.text]
        assert measurement.time_ms == pytest.approx(wanted, rel=0.1)
        assert measurement.samples >= 2
    assert selection.total_samples == sum(m.samples for m in selection.ranking)
    assert next(m for m in selection.ranking if m.candidate.text == "c4").eliminated


# Trials


def interrupted(times: Sequence[float] = (1.3, 1.0, 1.004, 2.5)) -> Undecided:
    one = Undecided()
    one.join(*(candidate(f"eng{i}:", i) for i in range(1, len(times))))
    one.turns(24, times)
    assert one.trial.step()
    return one


@pytest.mark.search
def test_a_trial_is_kept_at_the_end_of_the_process() -> None:
    one = interrupted()
    tuner = OnlineTuner()
    tuner.add(one.trial)
    one.turns(4, [1.3, 1.0, 1.004, 2.5])
    tuner.stop()
    (record,) = one.committer.kept
    assert record.is_out("eng3:")
    assert record.by_text.keys() == {"eng0:", "eng1:", "eng2:", "eng3:"}
    assert one.committer.selections == []


@pytest.mark.search
def test_a_trial_is_kept_when_nobody_calls_it_any_more() -> None:
    one = interrupted()
    del one.native
    assert not one.trial.step()
    assert one.committer.kept[-1] is not None


@pytest.mark.search
@pytest.mark.parametrize("first_ms", [1.3, 0.9])
def test_the_next_process_goes_on(first_ms: float) -> None:
    times = (first_ms, 1.0, 1.03, 2.5)
    one = interrupted(times)
    one.trial.keep()
    (record,) = one.committer.kept
    two = Undecided(earlier=read_back(record))
    is_out = record.is_out(FIRST.text)
    assert (0 not in two.trial.race.active) is is_out
    assert two.schedule.leader() == 0, "it serves until another one has joined"
    assert two.trial.step()
    two.join(*(candidate(f"eng{i}:", i) for i in (1, 2)))
    two.prepared.left_out.append(candidate("eng3:", 3))
    two.prepared.is_over = True
    while two.trial.step():
        ran = two.turns(2, times)
        assert not is_out or 0 not in ran
    (selection,) = two.committer.selections
    assert two.native.decided == ("eng0:" if first_ms < 1 else "eng1:")
    assert selection.winner.samples > 5
    assert {m.candidate.text for m in selection.ranking} == {f"eng{i}:" for i in range(4)}
    assert two.committer.kept[-1] is None, "decided: nothing is left to go on with"


# Files


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    ca.set_store(tmp_path, mode="read_write")
    yield tmp_path
    kept_plans._files.cache_clear()


RECORD = TrialRecord((KeptTurns("eng1:", (1.0, 0.0, 1.1)), KeptTurns("eng2:", (), "slow", 3.0, 2)))


def keep(record: TrialRecord | None, limits: str = "none") -> None:
    kept_plans.keep_trial(PROBLEM, limits, GPU, record and record.to_json())


def kept(limits: str = "none", problem: str = PROBLEM) -> TrialRecord | None:
    tree = kept_plans.find_trial(problem, limits, GPU)
    return None if tree is None else TrialRecord.from_json(tree)


@pytest.mark.search
def test_what_is_kept_is_found_by_its_problem_and_limits_only(folder: Path) -> None:
    assert kept() is None
    keep(RECORD)
    assert kept() == RECORD
    assert kept("benchmark_limit=3") is None
    assert kept(problem="another") is None
    keep(TrialRecord((KeptTurns("eng7:", (2.0,)),)))
    assert list(folder.glob("plans-*/*.trial"))
    assert kept() == TrialRecord((KeptTurns("eng7:", (2.0,)),))
    keep(None)
    assert kept() is None
    assert not list(folder.glob("plans-*/*.trial"))
    keep(None)


@pytest.mark.search
def test_what_is_damaged_or_anothers_is_not_believed(folder: Path) -> None:
    keep(RECORD)
    (file,) = folder.glob("plans-*/*.trial")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"eng1", b"eng9"))
    assert kept() is None
    file.write_bytes(whole[:-5])
    assert kept() is None
    file.write_bytes(whole)
    assert kept() == RECORD
    file.chmod(0o666)
    assert kept() is None


# Real processes, which end in the middle of a trial

PROCESS = """
import os, sys, time
import cudnn_autotune as ca
from cudnn_autotune.engines import devices
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.online import tuner as online_tuner
from cudnn_autotune.tuning.choice import Choice, untimed
from cudnn_autotune.online.tuner import OnlineCommitter
from cudnn_autotune.online.tuner import TUNER, Prepared, Trial
from support.tuning.online_trials import FIRST, Undecided
from support.conv.problems import make
from support.simulation import candidate

problem = make("resnet_fp16_nhwc")
decision = untimed(problem, Policy("online"), Measurement(FIRST, None, 0))
first = Choice(decision, devices.load("h200"))
committer = OnlineCommitter(first, Prepared(), 0)
earlier = committer.earlier()
print(earlier.rounds, flush=True)
one = Undecided(earlier=earlier)
one.trial.committer = committer
others = [candidate(f"eng{i}:", i) for i in (1, 2)]
others.sort(key=earlier.place)
one.join(*others)
times = {"eng1:": 1.0, "eng2:": 1.004}
one.turns(15, [1.3, *(times[other.text] for other in others)])
TUNER.add(one.trial)
"""


def process(folder: Path, end: str) -> subprocess.CompletedProcess[str]:
    env = {"CUDNN_AUTOTUNE_CACHE": "read_write", "CUDNN_AUTOTUNE_CACHE_DIR": str(folder)}
    return python("-c", PROCESS + end, env=env)


INTERRUPTED = "time.sleep(0.1)\nraise KeyboardInterrupt\n"
FORKS = """
child = os.fork()
if child == 0:
    assert TUNER.undecided == 0
    raise SystemExit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), TUNER.undecided)
"""
"""As a process that loads data after the model was tuned. The child keeps nothing, and ends."""


def killed(folder: Path) -> str:
    """Kills a process once it has kept its trial; returns what it has printed."""
    env = {**os.environ, "CUDNN_AUTOTUNE_CACHE": "read_write", "PYTHONPATH": IMPORTS}
    env["CUDNN_AUTOTUNE_CACHE_DIR"] = str(folder)
    code = PROCESS.replace("TUNER.add", "online_tuner._KEEP_EVERY_S = 0.05\nTUNER.add")
    command = [sys.executable, "-c", f"{code}\ntime.sleep(60)"]
    before = {path: path.stat().st_ino for path in folder.glob("plans-*/*.trial")}
    running = subprocess.Popen(
        command, env=env, cwd=PACKAGE_PARENT, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 600
    while {path: path.stat().st_ino for path in folder.glob("plans-*/*.trial")} == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    printed, _ = running.communicate(timeout=30)
    assert running.returncode == -signal.SIGKILL
    return printed


@pytest.mark.slow
@pytest.mark.search
def test_a_trial_that_ctrl_c_interrupts_goes_on_in_the_next_process(folder: Path) -> None:
    first, second = process(folder, INTERRUPTED), process(folder, "")
    assert "KeyboardInterrupt" in first.stderr
    assert first.stdout == "0\n"
    assert int(second.stdout) > 0


@pytest.mark.slow
@pytest.mark.search
def test_the_rounds_of_processes_add_up_however_they_end(folder: Path) -> None:
    rounds = []
    for end in ("", "time.sleep(0.1)\n", FORKS, "killed", ""):
        if end == "killed":
            printed = killed(folder)
        else:
            ended = process(folder, end)
            assert ended.stderr == ""
            printed = ended.stdout
        begun, *forked = printed.splitlines()
        assert forked == (["0 1"] if end == FORKS else [])
        rounds.append(int(begun))
    assert rounds[0] == 0
    assert rounds == sorted(set(rounds))
