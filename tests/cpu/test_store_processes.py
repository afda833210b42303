"""Many processes, and processes that are killed: what was acknowledged is there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from decisions import FRONTIER, H200, decision, selection
from subprocesses import python

from cudnn_autotune.store import Store

WRITERS = Path(__file__).parents[1] / "store_writers.py"


def run(command: str, folder: Path, *numbers: int) -> dict[str, Any]:
    done = python(str(WRITERS), command, str(folder), *map(str, numbers))
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    told = run("together", tmp_path, 8, 500)
    assert told["failed"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(tmp_path, H200)
        assert set(store.keys()) == {decision(1 + number).key for number in range(4000)}
        assert all(known.selection == selection(FRONTIER[:1]) for known in store)
    assert len(json.loads(store.path.read_bytes())["decisions"]) == 4000


def test_forks_while_threads_use_the_store(tmp_path: Path) -> None:
    """A child has none of these threads, and would wait for ever for what they hold."""
    told = run("forked", tmp_path, 20)
    assert told["hung"] == 0
    assert told["failed"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keys = set(Store(tmp_path, H200).keys())
    assert {decision(10**6 + child).key for child in range(20)} <= keys
    assert told["added"] > 0
    assert {decision(1 + number).key for number in range(told["added"])} <= keys


def test_a_writer_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    told = run("killed", tmp_path, 200, 1)
    # How many depends on the disk; without either, nothing was tried.
    assert told["acknowledged"] > 0
    assert told["midway"] > 0  # kills that left a half-written file, which nobody ever reads
    Store(tmp_path, H200).add([decision(5)])
    assert not list(tmp_path.glob(".*.part"))
    assert not list(tmp_path.glob("*.damaged*"))
