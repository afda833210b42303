"""Blank lines have no meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from decisions import H200, decision

from cudnn_autotune.store import Store, codec, file_format

KNOWN = [decision(n) for n in (1, 2, 3)]
FILE = file_format.encode(H200, [codec.encode(known, H200) for known in KNOWN])
HEAD, FIRST, SECOND, THIRD = FILE.splitlines(keepends=True)


pytestmark = pytest.mark.filterwarnings("error")


def test_blank_lines_stay(tmp_path: Path) -> None:
    """A change appends a line, as to any other file."""
    path = tmp_path / "store.json"
    data = FILE.replace(b"\n", b"\r\n\n\n")
    path.write_bytes(data)
    store = Store(path, H200)
    store.add([decision(4)])
    assert path.read_bytes().startswith(data)
    assert list(store) == list(Store(path, H200)) == [*KNOWN, decision(4)]


def test_zeros_are_damage_and_counted_once_a_line(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    for zeros, lines in (
        (b"\0" * 512 + b"\n", 1),
        (b"\0\n" * 7, 7),
        (b"\0\0rest of a line\n", 1),
        (b"rest of a line\0\0\n", 1),
    ):
        path.write_bytes(HEAD + FIRST + zeros + SECOND + THIRD)
        with pytest.warns(UserWarning, match=rf"{lines} of its lines cannot be read.*set aside"):
            assert list(Store(path, H200)) == KNOWN
