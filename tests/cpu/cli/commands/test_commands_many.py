"""``show`` of a store with many decisions prints the first ones."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from decisions import H200, decision, measured_otherwise, resealed
from stored import run, succeeded

from cudnn_autotune.cli.commands import show as show_module
from cudnn_autotune.cli.filters import in_order
from cudnn_autotune.cli.stores import read
from cudnn_autotune.store import Decision, codec, file_format

COUNT = 40
show: Any = show_module


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rng = random.Random(0)
    known = [measured_otherwise(decision(n), rng.random(), 2) for n in range(1, COUNT + 1)]
    rng.shuffle(known)
    path = tmp_path / "store.json"
    path.write_bytes(file_format.encode(H200, [codec.encode(one, H200) for one in known]))
    return path


@pytest.mark.parametrize("by", ["problem", "time", "workspace"])
def test_the_first_in_each_order(
    store: Path, by: str, seven: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Decision] = []
    monkeypatch.setattr(
        "cudnn_autotune.cli.decision_table.show",
        lambda console, decisions, *_: shown.extend(decisions),
    )
    succeeded("show", "--store", store, "--sort", by)
    assert shown == in_order(read(store).decisions, by)[:7]


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cudnn_autotune.cli.commands.show"], "_MOST_SHOWN", 7)


@pytest.mark.usefixtures("seven")
def test_show_prints_the_first_and_how_many_more_there_are(store: Path) -> None:
    text = succeeded("show", "--store", store)
    assert f"7 of {COUNT} decisions" in text
    assert "and 33 more: --all shows them" in text
    assert text.count("1×1×") == 7
    text = succeeded("show", "--store", store, "--sort", "time", "--engine", "fastest")
    assert text.count("1×1×") == 7
    assert "and 33 more" in text


@pytest.mark.usefixtures("seven")
def test_all_of_them(store: Path) -> None:
    text = succeeded("show", "--store", store, "--all")
    assert f"{COUNT} of {COUNT} decisions" in text
    assert text.count("1×1×") == COUNT
    assert "more" not in text.replace("more:", "more")[-60:]
    assert text.count(str(store.parent)) <= 1
    tree = json.loads(run("show", "--store", store, "--json").stdout)
    assert len(tree["decisions"]) == COUNT
    assert tree["path"] == str(store)


def test_json_of_none(tmp_path: Path) -> None:
    tree = json.loads(run("show", "--store", tmp_path, "--json").stdout)
    assert tree == {"path": None, "environment": None, "decisions": []}


@pytest.mark.usefixtures("seven")
def test_what_cannot_be_read_is_told_once(store: Path) -> None:
    lines = store.read_bytes().splitlines()
    lines[1:] = [resealed(line.replace(b'"samples":36', b'"samples":-1')) for line in lines[1:]]
    store.write_bytes(b"\n".join([*lines, b""]))
    done = run("show", "--store", store)
    assert done.exit_code == 0
    assert f"and {COUNT - 3} more" in done.stderr
    assert done.stderr.count("left out") == 3
