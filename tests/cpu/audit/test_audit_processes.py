"""Audit: real processes that pick, hang and die, on a simulation."""

from __future__ import annotations

import functools
import os
import textwrap
import time
from pathlib import Path

import pytest

from cudnn_autotune.audit import record_file
from cudnn_autotune.audit.judged_turns import OracleSettings
from cudnn_autotune.audit.model import Record
from cudnn_autotune.audit.schedule import AuditConfig, Session
from cudnn_autotune.audit.summary import left_out, shared_cases, summarize
from cudnn_autotune.tools.processes import CaseFailure, Process, ProcessFailure

SIMULATION = "support.simulation.audit"
Config = functools.partial(AuditConfig, backend=SIMULATION)
REQUEST = {
    "backend": SIMULATION,
    "name": "heuristic#1",
    "mode": "heuristic",
    "budget_ms": None,
    "oracle": {},
}

# Modes of a user's own, registered where every process imports them. They hang and die on the
# scene that has an engine of that name.
OWN_MODES = """
    import os
    import signal
    import sys
    import time

    from cudnn_autotune import sampling
    from cudnn_autotune.sampling import Selection, Measurement


    def first(candidates, timer):
        found = timer.runnable(candidates.all(), limit=1)
        return Selection((Measurement(found[0], None, 0),), total_samples=0)


    class Quick:
        name = "quick"

        def select(self, candidates, timer, limits):
            print("a library that prints to stdout")
            return first(candidates, timer)


    class Slow:
        name = "slow"

        def select(self, candidates, timer, limits):
            time.sleep(0.4)
            return first(candidates, timer)


    class Hangs:
        name = "hangs"

        def select(self, candidates, timer, limits):
            if any(c.text == "compiled" for c in candidates.all()):
                time.sleep(600)
            return first(candidates, timer)


    class Dies:
        name = "dies"

        def select(self, candidates, timer, limits):
            if any(c.text == "leader" for c in candidates.all()):
                print("last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return first(candidates, timer)


    class Odd:
        name = "odd"

        def select(self, candidates, timer, limits):
            found = timer.runnable(candidates.all(), limit=1)
            is_odd = timer.gpu.name == "simulated GPU, small kernels"
            return Selection((Measurement(found[0], -1.0 if is_odd else 1.0, 0),), total_samples=0)


    for strategy in (Quick(), Slow(), Hangs(), Dies(), Odd()):
        sampling.register(strategy)
"""


@pytest.fixture
def own_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that processes can import."""
    name = "own_modes_of_test_audit"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN_MODES))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def empty(cases: list[str]) -> Record:
    """A case is a preset and, after a dot, whatever sets it apart."""
    described = {case: {"simulation": case.split(".")[0]} for case in cases}
    return Record("gpu", settings={}, environment={}, cases=described)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# one process


def test_a_process_answers_until_it_is_closed() -> None:
    process = Process("heuristic#1", [SIMULATION])
    process.set_up(REQUEST)
    request = {"task": "pick", "case": {"simulation": "quiet"}}
    assert process.ask(request, 60)["text"] == "engine2"
    with pytest.raises(CaseFailure, match="preset must be one of"):
        process.ask({"task": "pick", "case": {"simulation": "unknown"}}, 60)
    assert process.ask(request, 60)["text"] == "engine2", "it goes on after a failure"
    process.leave()
    assert not is_running(process.pid)


# a session


@pytest.mark.slow
def test_a_whole_session_with_a_hang_and_a_death(tmp_path: Path, own_modes: str) -> None:
    record = empty(["quiet", "aa", "small-kernels", "depthwise"])
    config = Config(
        {"quick": 1, "hangs": 1, "dies": 1, "odd": 1},
        ["pytorch_off"],
        "quick",
        modules=[own_modes],
        case_limit_s=4.0,
    )
    path = tmp_path / "record.json"
    result: list[str] = []
    session = Session(
        config, record, list(record.cases), lambda: record_file.save(record, path), result.append
    )
    session.run()
    assert record.complete
    assert record_file.load(path).complete
    assert record.failures == [
        "hangs#1: no answer within 4 s",
        "dies#1: ended with exit code -9: last words",
    ]
    assert record.failures[0] in result
    # Who hung or died was replaced, and the replacement did the other cases.
    assert record.picks["hangs"]["1"]["quiet"].error == record.failures[0]
    assert record.picks["dies"]["1"]["aa"].error == record.failures[1]
    assert record.picks["hangs"]["1"]["depthwise"].text
    assert record.picks["dies"]["1"]["depthwise"].text
    # An answer that cannot be read costs its case only, and no process.
    told_odd = "odd#1, small-kernels.time_ms: must be a number from 0 to 1e+15, got -1.0"
    assert record.picks["odd"]["1"]["small-kernels"].error == told_odd
    assert record.picks["odd"]["1"]["depthwise"].text
    assert shared_cases(record) == ["depthwise"]
    reasons = left_out(record)
    assert reasons["quiet"] == "hangs#1: hangs#1: no answer within 4 s"
    assert reasons["aa"].startswith("dies#1: ")
    # Depthwise, ten times as fast with PyTorch's own kernel.
    row = record.pytorch["pytorch_off"]["depthwise"]
    assert row.reference == record.picks["quick"]["1"]["depthwise"].text
    assert row.ratios["burst cold"].median == pytest.approx(0.1, rel=0.1)
    summaries = summarize(record)
    assert summaries["quick"].regret.mean > 9
    assert summaries["pytorch_off"].regret.mean == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_a_session_is_cut_by_time_and_the_next_continues_it(own_modes: str) -> None:
    # How long starting two processes takes here and now, however busy the machine is.
    begin = time.monotonic()
    Session(
        Config({"slow": 1}, [], "slow", modules=[own_modes]),
        one := empty(["aa"]),
        ["aa"],
    ).run()
    started_s = time.monotonic() - begin
    assert one.complete
    cases = [f"depthwise.{i}" for i in range(200)]
    record = empty(cases)
    # As an earlier session would have left them: all cases take 80 s, far more than there are.
    saved = 0

    def save() -> None:
        nonlocal saved
        saved += 1

    limit_s = 4.0 + 1.5 * started_s
    config = Config({"slow": 1}, [], "slow", modules=[own_modes], time_limit_s=limit_s)
    Session(config, record, cases, save).run()
    first = dict(record.picks["slow"]["1"])
    assert 0 < len(first) < 200
    assert not record.complete
    assert saved >= 2
    assert list(first) == cases[: len(first)], "in the order in which they were given"
    judged = shared_cases(record)  # all, unless its process took all of its time to start
    assert judged == list(first)[: len(judged)]

    another = Config({"slow": 1}, [], "slow", modules=[own_modes])
    few = cases[: len(first) + 2]
    Session(another, record, few).run()
    second = record.picks["slow"]["1"]
    assert list(second) == few
    assert all(second[case] is pick for case, pick in first.items()), "done once, done for good"
    assert not record.complete, "the other cases are still to come"

    # Nothing is left to do: no process is started, which would fail.
    broken = Config({"slow": 1}, [], "slow", modules=["no_such_module"])
    Session(broken, record, few).run()
    assert not record.failures


@pytest.mark.slow
def test_new_picks_and_closer_looks_want_the_oracle_again(own_modes: str) -> None:
    record = empty(["h200-capped"])
    cases = list(record.cases)
    config = Config({"heuristic": 1}, [], "heuristic", OracleSettings())
    Session(config, record, cases).run()
    assert record.complete
    assert set(record.oracle["h200-capped"].truths) == {"burst cold", "burst hot"}
    closer = Config(
        {"heuristic": 1},
        [],
        "heuristic",
        OracleSettings(solo="throttled"),
    )
    session = Session(closer, record, cases)
    assert not session.is_complete("h200-capped")
    pick = record.picks["heuristic"]["1"]["h200-capped"]
    session.run()
    assert "sustained" in record.oracle["h200-capped"].truths
    assert record.picks["heuristic"]["1"]["h200-capped"] is pick
    assert session.is_complete("h200-capped")
    # A pick of another mode that no oracle has seen.
    record.picks["other"] = {"1": {"h200-capped": type(pick)(text="eng0:a")}}
    assert not session.is_complete("h200-capped")


@pytest.mark.slow
def test_a_session_that_cannot_start_says_so() -> None:
    record = empty(["quiet"])
    config = Config({"unknown": 1}, [], "unknown", modules=["no_such_module_of_anyone"])
    with pytest.raises(ProcessFailure, match=r"unknown#1: ended with exit code 1: .*no_such_"):
        Session(config, record, ["quiet"]).run()
