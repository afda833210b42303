"""A store's file that an earlier build of the package wrote is read, and its entries are encoded to
the same bytes again.

The decisions in the file are made up, with all kinds of candidates, and some do not fit whole.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from decisions import H200

from cudnn_autotune.store import Decision, Store, codec, file_format

WRITTEN = Path(__file__).parent / "data" / "h200_store.json"
HEADER, *LINES = WRITTEN.read_bytes().splitlines()


def unread(decision: Decision) -> Decision:
    """Returns an equal decision that does not remember the line it was read from."""
    return replace(decision)


@pytest.mark.parametrize("line", LINES)
def test_an_entry_is_encoded_to_the_bytes_it_was_read_from(line: bytes) -> None:
    decision = codec.decode(line, H200)
    assert not codec.is_as_read(unread(decision), H200)
    assert codec.encode(unread(decision), H200) == line


def test_entries_of_several_kinds_are_among_them() -> None:
    decisions = [codec.decode(line, H200) for line in LINES]
    entries = [entry for known in decisions for entry in known.selection.ranking]
    assert {entry.candidate.id.kind for entry in entries} == {
        *("aten", "matmul", "engine", "unfused", "implementation")
    }
    assert any(known.omitted for known in decisions)
    assert any(known.rejected for known in decisions)
    assert {known.problem.deterministic for known in decisions} == {False, True}


def test_the_header_is_encoded_alike() -> None:
    header, *_ = file_format.encode(H200, LINES).splitlines()
    written, expected = json.loads(header), json.loads(HEADER)
    assert written.pop("id") != expected.pop("id")  # each file has its own
    assert written == expected


def test_a_store_serves_the_file_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    path = Path(shutil.copy(WRITTEN, tmp_path / "store.json"))
    store = Store(path, H200)
    assert {codec.encode(known, H200) for known in store} == set(LINES)
    store.add(map(unread, [*store]))
    assert path.read_bytes() == WRITTEN.read_bytes()
