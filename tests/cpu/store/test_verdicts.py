"""Verdicts on disk: what was measured once serves the next process, if it can be read and holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import cudnn_autotune as ca
from cudnn_autotune.store.verdicts import find_kept, keep, kept_or_measured


@dataclass(frozen=True)
class Times:
    """An entry."""

    one_ms: float
    other_ms: float


@pytest.fixture(autouse=True)
def _store(tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")


def asked(times: Times, **options: object) -> tuple[Times, bool]:
    return kept_or_measured(None, "pair a", Times, lambda: times, **options)  # type: ignore[arg-type]


def test_what_was_measured_is_kept() -> None:
    assert asked(Times(1.0, 2.0)) == (Times(1.0, 2.0), False)
    assert asked(Times(3.0, 4.0)) == (Times(1.0, 2.0), True)
    assert find_kept(None, "pair a", Times) == Times(1.0, 2.0)
    assert find_kept(None, "pair b", Times) is None


def test_what_holds_no_longer_is_measured_again() -> None:
    asked(Times(1.0, 2.0))
    assert asked(Times(3.0, 4.0), holds=lambda kept: kept.one_ms > 2) == (Times(3.0, 4.0), False)
    assert asked(Times(5.0, 6.0), holds=lambda kept: kept.one_ms > 2) == (Times(3.0, 4.0), True)


def test_what_is_not_final_is_not_kept() -> None:
    assert asked(Times(1.0, 2.0), is_final=lambda new: False) == (Times(1.0, 2.0), False)
    assert find_kept(None, "pair a", Times) is None


@pytest.mark.parametrize("tree", [{}, [], {"one_ms": "1", "other_ms": 2.0}, {"one_ms": 1.0}, None])
def test_what_cannot_be_read_is_measured_again(tree: object) -> None:
    keep(None, "pair a", tree)
    assert find_kept(None, "pair a", Times) is None
    assert asked(Times(1.0, 2.0)) == (Times(1.0, 2.0), False)
    assert find_kept(None, "pair a", Times) == Times(1.0, 2.0)


@pytest.mark.parametrize("mode", ["off", "retune", "read"])
def test_the_stores_mode_holds_for_verdicts(mode: str, tmp_path: Path) -> None:
    asked(Times(1.0, 2.0))
    ca.set_store(mode=mode)  # type: ignore[arg-type]
    found, is_kept = asked(Times(3.0, 4.0))
    assert is_kept == (mode == "read")
    ca.set_store(mode="read_write")
    is_replaced = mode == "retune"
    assert find_kept(None, "pair a", Times) == (Times(3.0, 4.0) if is_replaced else Times(1.0, 2.0))
    assert found == (Times(1.0, 2.0) if is_kept else Times(3.0, 4.0))
    (file,) = tmp_path.glob("*.norms")
    assert "pair a" in file.read_text()
    assert all(json.loads(line) for line in file.read_text().splitlines())
