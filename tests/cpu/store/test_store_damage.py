"""A damaged file is set aside, a foreign one left alone; one warning says so, nothing is lost."""

from __future__ import annotations

import json
import logging
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.store.decisions import (
    FRONTIER,
    H200,
    L4,
    decision,
    measured_otherwise,
    problem,
    resealed,
    selection,
)

from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store

KNOWN = [decision(n) for n in (1, 2, 3)]


def written(tmp_path: Path) -> tuple[Path, bytes]:
    store = Store(tmp_path, H200)
    store.add(KNOWN)
    return store.path, store.path.read_bytes()


def opened(path: Path, read_only: bool = False) -> tuple[Store, list[str]]:
    """Opens a store and returns it with the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store(path, H200, read_only=read_only)
        found = list(store)
        assert all(known in [*KNOWN, decision(4)] for known in found)
    assert all(warning.category is UserWarning for warning in caught)
    return store, [str(warning.message) for warning in caught]


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


def assert_set_aside(path: Path, damaged: bytes, rescued: list[Any]) -> None:
    path.write_bytes(damaged)
    before = aside(path)
    store, said = opened(path)
    assert len(said) == 1
    assert str(path) in said[0]
    assert "damaged" in said[0]
    new = [file for file in aside(path) if file not in before]
    assert len(new) == 1
    assert new[0].read_bytes() == damaged
    assert re.fullmatch(r".*\.json\.damaged-\d{8}T\d{6}Z(-\d+)?", new[0].name)
    assert new[0].name in said[0]
    assert list(store) == rescued
    # The file is whole again: another process can use it without a warning.
    assert opened(path)[1] == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.add([decision(4)])
        assert list(Store(path, H200)) == [*rescued, decision(4)]


def test_truncated_at_every_kind_of_place(tmp_path: Path) -> None:
    """The header counts the entries with which the file began, so a lost end is noticed."""
    path, data = written(tmp_path)
    lines = data.splitlines(keepends=True)
    ends = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    rng = random.Random(0)
    places = {end + offset for end in ends for offset in (-2, -1, 0, 1, 2)}
    places |= {rng.randrange(len(data)) for _ in range(20)}
    # A shorter file does not say that it is a store's.
    least = len(b'{"format": "cudnn-autotune store"')
    for place in sorted(p for p in places if least <= p < len(data) - 1):
        # An entry is whole even without its line feed.
        whole = [known for known, end in zip(KNOWN, ends[2:], strict=True) if place >= end - 1]
        assert_set_aside(path, data[:place], whole)


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"format": "cudnn-autotune store"',
        b'{"format": "cudnn-autotune store", "version": 2,',
        b'{"format": "cudnn-autotune store", "version": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'\xef\xbb\xbf{"format":"cudnn-autotune store"}',
        b'{"format": "cudnn-autotune store", "version": 2}',
        b'{"format": "cudnn-autotune store"}',
    ],
    ids=lambda data: repr(data[:12]),
)
def test_of_a_file_without_entries_nothing_is_left(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / H200.file_name
    assert_set_aside(path, damaged, [])


def damages() -> dict[str, Callable[[bytes], tuple[bytes, list[Decision]]]]:
    """Returns functions from a file of three entries to a damaged file and its intact entries."""

    def split(data: bytes) -> tuple[bytes, bytes, bytes, bytes]:
        head, first, second, third = data.splitlines(keepends=True)
        return head, first, second, third

    def in_lines(
        change: Callable[[bytes, bytes, bytes, bytes], list[bytes]], intact: list[Decision]
    ) -> Callable[[bytes], tuple[bytes, list[Decision]]]:
        return lambda data: (b"".join(change(*split(data))), intact)

    ends = [KNOWN[0], KNOWN[2]]
    return {
        "half of a line": in_lines(lambda h, a, b, c: [h, a, b[: len(b) // 2], c], KNOWN[:1]),
        "half of a line, ended": in_lines(
            lambda h, a, b, c: [h, a, b[: len(b) // 2] + b"\n", c], ends
        ),
        "a bit": in_lines(lambda h, a, b, c: [h, a, b.replace(b"1.0", b"1.1", 1), c], ends),
        "a name": in_lines(lambda h, a, b, c: [h, a, b.replace(b"x=1", b"x=9", 1), c], ends),
        # A power failure leaves a block of zeros.
        "zeros": in_lines(lambda h, a, b, c: [h, a, b"\0" * len(b), c], ends),
        "zeros, ended": in_lines(lambda h, a, b, c: [h, a, b"\0" * 512 + b"\n", c], ends),
        # Without a header, or its environment, the checksums show that the lines are of this one.
        "no head": in_lines(lambda h, a, b, c: [a, b, c], KNOWN),
        "zeros for a head": in_lines(lambda h, a, b, c: [b"\0" * 100, b"\n", a, b, c], KNOWN),
        "no environment": in_lines(lambda h, a, b, c: [h.replace(b"gpu", b"cpu"), a, b, c], KNOWN),
        "no version": in_lines(lambda h, a, b, c: [h.replace(b": 2,", b": ?,"), a, b, c], KNOWN),
        # A merge of two versions leaves such markers.
        "a conflict": in_lines(
            lambda h, a, b, c: [h, b"<<<<<<< ours\n", a, b"=======\n", b, c], KNOWN
        ),
        "joined": lambda data: (data + data, KNOWN),
        "written otherwise": lambda data: (data.replace(b'":{"', b'": {"'), []),
    }


@pytest.mark.parametrize("name", damages())
def test_what_lies_between_damaged_lines_is_kept(tmp_path: Path, name: str) -> None:
    path, data = written(tmp_path)
    damaged, intact = damages()[name](data)
    assert damaged != data
    assert_set_aside(path, damaged, intact)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "2"),
        ("version", 2.0),
        ("version", True),
        ("version", 0),
        ("version", None),
        ("version", [2]),
        ("environment", None),
        ("environment", {"gpu": "NVIDIA H200"}),
        ("environment", {**H200.to_json(), "multiprocessors": "132"}),
    ],
)
def test_wrong_types_in_the_header(tmp_path: Path, field: str, value: object) -> None:
    path, data = written(tmp_path)
    head, body = data.split(b"\n", 1)
    tree = {**json.loads(head), field: value}
    assert_set_aside(path, json.dumps(tree).encode() + b"\n" + body, KNOWN)


# Whole files with entries that must not be served


def served_otherwise(path: Path, line: bytes) -> tuple[Store, list[str]]:
    """Replaces the second entry by ``line``; opening does not warn, the lookup does."""
    lines = path.read_bytes().split(b"\n")
    lines[2] = line
    path.write_bytes(b"\n".join(lines))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store(path, H200)
        assert not caught
        assert store.find(KNOWN[1].problem) is None
        assert store.find(KNOWN[1].problem) is None
        assert list(Store(path, H200)) == [KNOWN[0], KNOWN[2]]
    assert not aside(path)
    return store, [str(warning.message) for warning in caught]


ROW = ["eng1", 0, "A", 0, [], [], 9, 1.0]


@pytest.mark.parametrize(
    "change",
    [
        *({"ranking": None}, {"ranking": []}, {"ranking": [[]]}, {"ranking": [None]}),
        {"ranking": "__import__('os').system('true')"},
        *({"ranking": [[*ROW[:place], value, *ROW[place + 1 :]]]} for place, value in [
            (0, 1), (1, -1), (1, 2**63), (2, None), (3, 1.5), (3, True), (4, [1]), (4, None),
            (5, 7), (6, -1), (6, None), (7, -1.0), (7, "1"), (7, 1e300), (7, [1.0]),
        ]),
        *({"ranking": [[*ROW, None, None, None, "", "", *end]]} for end in [
            [1, []], [1, {"a": "1"}], ["1", {}], [None, {}, 1],
        ]),
        *({"evidence": value} for value in [
            None, [], {}, {"tied": [7]}, {"tied": 1}, {"tied": [], "rule": 3},
            {"tied": [], "surprise": 3}, {"tied": [], "gpu_ms": None}, {"tied": [], "gpu_ms": -1},
            {"tied": [], "burst_weight": 2}, {"tied": [], "sustained_reach": 0.5},
            {"tied": [], "disturbed": 0.5}, {"tied": [None]}, {"tied": [], "remarks": [1]},
        ]),
        *({"rejected": value} for value in [[[]], [["x"]], [["x", -1]], [[1, 1]], "xy", 5]),
        *({"workspace_limit": value} for value in [-1, 1.5, "1"]),
        *({"relative_error": value} for value in [-1, "small"]),
        *({"provenance": value} for value in [
            None, {"time": 3}, {"time": "yesterday"}, {"revision": -1}, {"colour": "red"},
            {"driver": None},
        ]),
        *({"samples": value} for value in [None, -1, 1.5]),
        *({"omitted": -1}, {"surprise": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_that_is_no_decision_is_not_served(tmp_path: Path, change: dict[str, Any]) -> None:
    path, data = written(tmp_path)
    tree = json.loads(data.split(b"\n")[2])
    tree["decision"] |= change
    line = resealed(json.dumps(tree, separators=(",", ":")).encode())
    store, said = served_otherwise(path, line)
    assert len(said) == 1
    assert "is not served" in said[0]
    # A new decision takes its place.
    store.add([KNOWN[1]])
    assert sorted(known.key for known in Store(path, H200)) == sorted(k.key for k in KNOWN)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.replace(b"sampling=auto", b"sampling=race"),
        lambda line: line.replace(b"benchmark_limit=0", b"benchmark_limit=00"),
        lambda line: line.replace(b"benchmark_limit=0", b"benchmark_limit=10"),
        lambda line: line.replace(b"x=1x1x2x1", b"x=1x1x9x1"),
        lambda line: line.replace(b"x=1x1x2x1", b"x=1x1x02x1"),
        lambda line: line.replace(b"fprop", b"foprp"),
        lambda line: line.replace(b'"decision":{', b'"name":"x","decision":{'),
        lambda line: line.replace(b'"decision":{', b'"decision":{"ranking":[],'),
        lambda line: line.replace(b'"decision":{', b'"decision":[' + b"[" * 200_000),
        lambda line: line.replace(b'"decision":', b'"surprise":'),
        lambda line: line[:-1],
        lambda line: line + b"}",
        lambda line: line.replace(b"TENSOR", b"\xff"),
    ],
)
def test_no_decision_is_served_under_the_name_of_another(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    path, data = written(tmp_path)
    lines = data.split(b"\n")
    lines[2] = resealed(change(lines[2]))
    path.write_bytes(b"\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = Store(path, H200)
        for known in store:
            assert known.key.encode() in path.read_bytes()
            assert store.by_key(known.key) == known
        found = store.find(KNOWN[1].problem)
        assert found is None or found == KNOWN[1]
        for known in (KNOWN[0], KNOWN[2]):
            assert store.find(known.problem) == known


def test_an_entry_of_another_gpu_pasted_in_is_not_served(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    foreign = Store(tmp_path / "other", L4)
    foreign.add([measured_otherwise(KNOWN[1], 99.0, day=30)])
    lines = data.splitlines(keepends=True)
    lines[2] = foreign.path.read_bytes().splitlines(keepends=True)[1]
    assert_set_aside(path, b"".join(lines), [KNOWN[0], KNOWN[2]])


# Files that are left alone


def left_alone(path: Path, data: bytes, why: str) -> None:
    path.write_bytes(data)
    store, said = opened(path)
    assert len(said) == 1
    assert str(path) in said[0]
    assert why in said[0]
    assert len(store) == 0
    assert not store.is_writable
    again, said = opened(path)
    assert not said
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning was given before
        again.put(problem(size=1), selection(FRONTIER[:1]))
        assert again.get(problem(size=1)) == selection(FRONTIER[:1])
        assert again.discard(again) == 1
        again.add([decision(4)])
    assert list(again) == [decision(4)]
    assert path.read_bytes() == data
    assert not aside(path)
    # Once the file is removed, the decisions in memory are written.
    path.unlink()
    again.add([decision(3)])
    assert again.is_writable
    assert sorted(k.key for k in Store(path, H200)) == sorted(decision(n).key for n in (3, 4))


@pytest.mark.parametrize("version", [1, 3, 17, 10**8])
def test_a_file_of_another_version(tmp_path: Path, version: int) -> None:
    path, data = written(tmp_path)
    other = data.replace(b'"version": 2', b'"version": %d' % version)
    left_alone(path, other, f"version {version}")
    left_alone(tmp_path / "a.json", other.replace(b"}\n", b"} # in a form yet unknown\n"), "vers")
    left_alone(tmp_path / "b.json", other[:200], f"version {version}")
    tree = {"decisions": {}, "version": version, "format": "cudnn-autotune store"}
    left_alone(tmp_path / "c.json", json.dumps(tree).encode(), f"version {version}")
    tree = {"format": "cudnn-autotune store", "version": version, "decisions": {}}
    left_alone(tmp_path / "d.json", json.dumps(tree, indent=1).encode(), f"version {version}")


def test_a_file_of_another_environment(tmp_path: Path) -> None:
    foreign = Store(tmp_path / "other", L4)
    foreign.add(KNOWN)
    data = foreign.path.read_bytes()
    left_alone(tmp_path / "a.json", data, "another environment (nvidia-l4_58sm")
    # A damaged file of another environment is left alone as well.
    left_alone(tmp_path / "b.json", data[:-9], "another environment")


def test_what_may_only_be_read_is_passed_over_where_it_is_of_another_environment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An application may ship a file for each GPU, so this is expected and causes no warning."""
    foreign = Store(tmp_path / "other", L4)
    foreign.add(KNOWN)
    with caplog.at_level(logging.INFO, logger="cudnn_autotune"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(Store(foreign.path, H200, read_only=True)) == []
    (line,) = [record.message for record in caplog.records]
    assert "is not asked: it is of another environment (nvidia-l4" in line
    newer = tmp_path / "newer.json"
    newer.write_bytes(foreign.path.read_bytes().replace(b'"version": 2', b'"version": 3'))
    with pytest.warns(UserWarning, match="is not asked: it is of version 3") as said:
        Store(newer, H200, read_only=True)
    assert "memory" not in str(said[0].message)


@pytest.mark.parametrize(
    "data",
    [
        b"# Notes\n\nbuy milk\n",
        b'// settings\n{"editor": "vi",}\n',
        b'{"event": 1}\n{"event": 2}\n',
        b"{'format': 1}",
        b'{"format": "cudnn-au',
        b"\n",
        b"\0" * 5000,
        bytes(range(256)) * 20,
        b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        b"[" * 100_000,
        b"The cache:\n" + b"-" * 300 + b'\n{"format": "cudnn-autotune store", "version": 1,\n',
        b"As it looks:\n" + codec.encode(KNOWN[0], H200) + b"\n",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_never_said_that_it_is_a_store(tmp_path: Path, data: bytes) -> None:
    left_alone(tmp_path / "notes.json", data, "no file of 'cudnn-autotune store'")
    # A file that has the name of a store's file is left alone as well.
    left_alone(tmp_path / H200.file_name, data, "no file of 'cudnn-autotune store'")


def test_what_a_link_leads_to_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "home" / "notes.txt"
    notes.parent.mkdir()
    notes.write_bytes(b"buy milk\n")
    link = tmp_path / H200.file_name
    link.symlink_to(notes)
    with pytest.warns(UserWarning, match="left alone"):
        store = Store(tmp_path, H200)
    store.add([decision(1)])
    assert list(store) == [decision(1)]
    assert link.is_symlink()
    assert notes.read_bytes() == b"buy milk\n"
    assert [file.name for file in notes.parent.iterdir()] == ["notes.txt"]


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.warns(UserWarning, match=f"left alone.*{1 << 28} bytes.*{1 << 40}"):
        store = Store(path, H200)
    assert not store.is_writable
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning was given before
        store.add([decision(1)])
        assert list(store) == [decision(1)]
    assert path.stat().st_size == 1 << 40


# The warnings


def test_what_must_not_be_touched_is_said_once_and_served(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    path.write_bytes(data[:-30])
    for count in (1, 0, 0):
        store, said = opened(path, read_only=True)
        assert len(said) == count
        assert list(store) == KNOWN[:2]
    assert path.read_bytes() == data[:-30]
    assert not aside(path)


def test_damage_that_happens_while_a_store_is_open(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    store = Store(path, H200)
    path.write_bytes(data[:-30])
    with pytest.warns(UserWarning, match="damaged"):
        store.add([decision(4)])
    assert list(store) == list(Store(path, H200)) == [*KNOWN[:2], decision(4)]
    assert aside(path)[0].read_bytes() == data[:-30]


def test_a_process_whose_warnings_are_errors_loses_nothing(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    path.write_bytes(data[:-30])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="damaged"):
            Store(path, H200)
        assert list(Store(path, H200)) == KNOWN[:2]
