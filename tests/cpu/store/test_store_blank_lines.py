"""Blank lines have no meaning, cost little to read, and go with the next change if many."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from decisions import H200, decision

from cudnn_autotune.store import Store, codec, file_format

KNOWN = [decision(n) for n in (1, 2, 3)]
FILE = file_format.encode(H200, [codec.encode(known, H200) for known in KNOWN])
HEAD, FIRST, SECOND, THIRD = FILE.splitlines(keepends=True)
MUCH = 8 << 20


pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \n", b"\t\n\n \r\n"])
@pytest.mark.parametrize("place", ["behind", "between", "before the first"])
def test_a_padded_file_is_read_in_little_memory_and_compacted(
    tmp_path: Path, blank: bytes, place: str
) -> None:
    padding = blank * (MUCH // len(blank))
    parts = {
        "behind": [HEAD, FIRST, SECOND, THIRD, padding],
        "between": [HEAD, FIRST, padding, SECOND, padding, THIRD],
        "before the first": [HEAD, padding, FIRST, SECOND, THIRD],
    }
    path = tmp_path / "store.json"
    path.write_bytes(b"".join(parts[place]))
    size = path.stat().st_size
    tracemalloc.start()
    store = Store(path, H200)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 1.5 * size
    assert list(store) == KNOWN
    assert path.stat().st_size == size  # reading changes nothing
    store.add([decision(4)])
    assert path.stat().st_size < 10_000
    assert list(store) == list(Store(path, H200)) == [*KNOWN, decision(4)]
    assert len(list(tmp_path.iterdir())) == 2  # the file and its lock: nothing is set aside


def test_what_is_padded_while_it_is_open_is_compacted_as_well(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_bytes(FILE)
    store = Store(path, H200)
    for _ in range(3):
        with path.open("ab") as file:
            file.write(b"\n" * 100_000)
        assert store.by_key(decision(9).key) is None  # a miss reads the new lines
    store.add([decision(4)])
    assert path.stat().st_size < 10_000
    assert list(store) == list(Store(path, H200)) == [*KNOWN, decision(4)]


def test_a_few_blank_lines_stay(tmp_path: Path) -> None:
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
