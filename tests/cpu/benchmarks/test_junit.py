"""Runs of pytest by benchmarks: what ended before the time limit is reported."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from common import junit

TESTS = """
import time, pytest

def test_right(): pass

def test_wrong(): assert 1 == 2

@pytest.mark.skip(reason="no reason")
def test_left_out(): pass

def test_long(): time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_time_limit(workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    options = argparse.Namespace(log=tmp_path / "log", workers=workers, time_limit=40.0)
    code, tests = junit.run(["test_some.py"], options, cwd=tmp_path)
    assert code == pytest.ExitCode.INTERRUPTED
    ended = {test.name: test.outcome for test in tests if test.name != "test_long"}
    assert ended == {"test_right": "passed", "test_wrong": "failed", "test_left_out": "skipped"}


def test_an_interrupted_pytest_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(junit, "_ENDING_S", 1.0)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(300)"
    assert junit._status([sys.executable, "-c", deaf], 5.0) == pytest.ExitCode.INTERRUPTED


def test_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_right(): pass")
    options = argparse.Namespace(log=tmp_path / "log", workers=1, time_limit=None)
    code, tests = junit.run(["test_some.py"], options, cwd=tmp_path)
    assert (code, [test.outcome for test in tests]) == (0, ["passed"])
