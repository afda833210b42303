"""``online``: a trial that the end of a process interrupts goes on in the next one."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import checkout
import pytest
from online_trials import FIRST, Calls, Undecided, race_of
from problems import make
from simulation import candidate
from subprocesses import PACKAGE_PARENT, python

import cudnn_autotune as ca
from cudnn_autotune.engines import devices
from cudnn_autotune.sampling.online_race import KeptTurns, OnlineRace, TrialRecord
from cudnn_autotune.store import kept_plans
from cudnn_autotune.tuning.online_tuner import OnlineTuner

TESTS = str(checkout.TESTS)
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


def test_a_record_is_small() -> None:
    race = race_of(40)
    calls = Calls(race, [1.0 + 0.002 * (i % 4) + (i > 4) for i in range(40)])
    for _ in range(700):
        calls.round(noise=0.2)
        race.judge()
    record = race.record()
    assert record.rounds == race.rules.most_rounds
    assert len(json.dumps(record.to_json())) < 32_000


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


def test_times_of_another_day_are_compared_within_their_rounds() -> None:
    """The second process has half the clock, and a candidate that the first had not built."""
    race = OnlineRace([candidate("c0"), candidate("c1", 1)])
    calls = Calls(race, [1.0, 1.004])
    for _ in range(20):
        calls.round(noise=0.02)
    earlier = read_back(race.record())
    race = OnlineRace([candidate("c0"), candidate("c1", 1)], earlier=earlier)
    race.join([candidate("new", 2)])
    calls = Calls(race, [1.0, 1.004, 0.9], seed=7)
    assert calls.decide(lambda: math.log(2.0)) == 2


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
def test_a_trial_is_kept_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    one = interrupted()
    assert one.trial.step()
    assert one.committer.kept == []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert one.trial.step()
    assert len(one.committer.kept) == 1
    monkeypatch.setattr(time, "monotonic", lambda: now + 120)
    assert one.trial.step()
    assert len(one.committer.kept) == 1, "nothing is new"


@pytest.mark.search
def test_what_was_forgotten_is_not_kept() -> None:
    one = interrupted()
    one.committer.is_wanted = False
    assert not one.trial.step()
    assert one.committer.kept == []


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


@pytest.mark.search
@pytest.mark.parametrize(("mode", "is_kept"), [("off", False), ("read", False), ("retune", True)])
def test_the_modes_of_the_store_hold(folder: Path, mode: str, is_kept: bool) -> None:
    ca.set_store(folder, mode=mode)
    keep(RECORD)
    assert kept() is None, "it is not read"
    ca.set_store(folder, mode="read")
    assert (kept() is not None) is is_kept


@pytest.mark.search
def test_a_full_disk_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    keep(RECORD)
    assert kept() is None
    assert not [path for path in folder.rglob("*") if path.is_file()]


# Real processes, which end in the middle of a trial

PROCESS = f"""
import os, sys, time
sys.path.insert(0, {TESTS!r})
import cudnn_autotune as ca
from cudnn_autotune.engines import devices
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.store import Policy
from cudnn_autotune.tuning import online_tuner
from cudnn_autotune.tuning.choice import Choice, untimed
from cudnn_autotune.tuning.online_calls import OnlineCommitter
from cudnn_autotune.tuning.online_tuner import TUNER, Prepared, Trial
from online_trials import FIRST, Undecided
from problems import make
from simulation import candidate

problem = make("resnet_fp16_nhwc")
decision = untimed(problem, Policy("online"), Measurement(FIRST, None, 0))
first = Choice(decision, devices.load("h200"))
committer = OnlineCommitter(first, Prepared(), 0)
earlier = committer.earlier()
print(earlier.rounds, flush=True)
one = Undecided(earlier=earlier)
one.trial.committer = committer
others = [candidate(f"eng{{i}}:", i) for i in (1, 2)]
others.sort(key=earlier.place)
one.join(*others)
times = {{"eng1:": 1.0, "eng2:": 1.004}}
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
    env = {**os.environ, "CUDNN_AUTOTUNE_CACHE": "read_write", "PYTHONPATH": PACKAGE_PARENT}
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
