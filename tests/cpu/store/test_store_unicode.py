"""A text with half of a surrogate pair is refused where it is read, wherever it stands.

JSON may hold one by an escape, such as ``"\\ud800"``. It is a str of Python, but no encoding and no
function of the extension takes it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.store.decisions import EVIDENCE, H200, decision, resealed, selection, timed
from support.store.stored import run

from cudnn_autotune.store import codec, file_format
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store

FULL = decision(
    1,
    rejected=(("wrong", 0.5),),
    selection=selection(
        [
            timed("eng1", 1.0, 0, "NOTE", low_ms=0.9, high_ms=1.1, rank=1),
            timed("aten", 1.1, eliminated="late", runs="eng1", rank=2),
        ],
        dataclasses.replace(EVIDENCE, tied=("eng1",)),
    ),
)


def changed(tree: Any, path: tuple[str | int, ...], is_name: bool, text: str) -> Any:
    tree = copy.deepcopy(tree)
    inner = tree
    for name in path[:-1]:
        inner = inner[name]
    if is_name:
        inner[str(path[-1]) + text] = inner.pop(path[-1])
    else:
        inner[path[-1]] = text
    return tree


LINE = json.loads(codec.encode(FULL, H200))


def line_of(tree: Any) -> bytes:
    return resealed(json.dumps(tree, separators=(",", ":")).encode())


@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_serves_the_others(tmp_path: Path, read_only: bool) -> None:
    spoilt = line_of(changed(LINE, ("decision", "ranking", 0, 0), False, "eng0:K=1\udc80"))
    path = tmp_path / "store.json"
    path.write_bytes(file_format.encode(H200, [spoilt, codec.encode(decision(2), H200)]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store(path, H200, read_only=read_only)
        assert list(store) == [decision(2)]
        assert store.find(FULL.problem) is None
    (said,) = [str(one.message) for one in caught]
    assert "an entry is not served" in said
    assert "valid Unicode" in said
    assert FULL.key in set(store.keys())
    assert run("show", "--store", path).exit_code == 0
    # A new measurement takes its place.
    store.add([FULL])
    assert store.find(FULL.problem) is not None


def test_a_decision_with_one_cannot_be_added(tmp_path: Path) -> None:
    """A mode of a user may say anything; nothing is written then."""
    spoilt: Decision = dataclasses.replace(
        FULL, selection=selection([timed("eng1\ud800", 1.0, rank=1)])
    )
    store = Store(tmp_path, H200)
    with pytest.raises(ValueError, match="valid Unicode"):
        store.add([spoilt])
    assert len(store) == 0
