"""What a store has acknowledged is there, with many processes and with killed ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.processes.subprocesses import evaluate_forked
from support.store.decisions import FRONTIER, H200, decision, selection

from cudnn_autotune.store.file_store import Store


def run(function: str, folder: Path, *numbers: int) -> dict[str, Any]:
    """What a function of store_writers.py returns, in a process of its own."""
    code = f"""
import json, pathlib, sys, warnings
warnings.simplefilter("error")
from support.store import writers as store_writers
print(json.dumps(store_writers.{function}(pathlib.Path({str(folder)!r}), *{numbers!r})))
"""
    told: dict[str, Any] = json.loads(evaluate_forked(code))
    return told


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    assert run("together", tmp_path, 8, 50)["failed"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(tmp_path, H200)
        assert set(store.keys()) == {decision(1 + number).key for number in range(400)}
        assert all(known.selection == selection(FRONTIER[:1]) for known in store)
    assert len(store.path.read_bytes().splitlines()) == 1 + 400


@pytest.mark.slow
def test_forks_while_threads_use_the_store(tmp_path: Path) -> None:
    """A child has none of these threads, so it would wait for ever for a lock that one holds."""
    told = run("forked", tmp_path, 10)
    assert told["hung"] == 0
    assert told["failed"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = set(Store(tmp_path, H200).keys())
    assert {decision(10**6 + child).key for child in range(10)} <= keys
    assert told["added"] > 0
    assert {decision(1 + number).key for number in range(told["added"])} <= keys


def test_a_writer_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    told = run("killed", tmp_path, 40, 1)
    # Their numbers depend on the disk; if one were 0, the test would have tried nothing.
    assert told["acknowledged"] > 0
    assert told["unfinished"] > 0  # written, but killed before the acknowledgement
    Store(tmp_path, H200).add([decision(5)])
    assert not list(tmp_path.glob("*.damaged*"))


@pytest.mark.slow
def test_a_writer_that_is_killed_while_it_writes_the_file_anew(tmp_path: Path) -> None:
    told = run("replacing", tmp_path)
    assert told["was_killed"]
    assert told["left"] == 1
    assert told["lines"][0] > 60
    assert told["lines"][1] == 1 + 3
    assert told["entries"] == [2, 3]
    assert not list(tmp_path.glob(".*.part"))
    assert not list(tmp_path.glob("*.damaged*"))
