"""Files that are not what they should be: set aside or left alone, said once, and nothing lost that
was intact."""

from __future__ import annotations

import json
import logging
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from decisions import FRONTIER, H200, L4, decision, measured_otherwise, problem, selection

from cudnn_autotune.store import Store, entry

KNOWN = [decision(n) for n in (1, 2, 3)]


def written(tmp_path: Path) -> tuple[Path, bytes]:
    store = Store(tmp_path, H200)
    store.add(KNOWN)
    return store.path, store.path.read_bytes()


def opened(path: Path, read_only: bool = False) -> tuple[Store, list[str]]:
    """The store, and what was said of it."""
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
    # It is whole again: another process has nothing to say of it, and it can be used.
    assert opened(path)[1] == []
    assert json.loads(path.read_bytes())["format"] == "cudnn-autotune store"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.add([decision(4)])
        assert list(Store(path, H200)) == [*rescued, decision(4)]


def test_truncated_at_every_kind_of_place(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    lines = data.splitlines(keepends=True)
    ends = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    rng = random.Random(0)
    places = {end + offset for end in ends for offset in (-2, -1, 0, 1, 2)}
    places |= {rng.randrange(len(data)) for _ in range(60)}
    # What ends earlier does not say whose it is.
    least = len(b'{"format": "cudnn-autotune store"')
    for place in sorted(p for p in places if least <= p < len(data) - 1):
        # An entry needs no line end to be whole, and no comma.
        needed = [ends[4] - 2, ends[5] - 2, ends[6] - 1]
        whole = [known for known, end in zip(KNOWN, needed, strict=True) if place >= end]
        assert_set_aside(path, data[:place], whole)


def test_without_its_last_line_end_a_file_is_whole(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    path.write_bytes(data[:-1])
    store, said = opened(path)
    assert (list(store), said) == (KNOWN, [])


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"format": "cudnn-autotune store"',
        b'{"format": "cudnn-autotune store", "version": 1,',
        b'{"format": "cudnn-autotune store", "version": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'\xef\xbb\xbf{"format":"cudnn-autotune store"}',
        b'{"format": "cudnn-autotune store", "version": 1}',
        b'{"format": "cudnn-autotune store"}',
    ],
    ids=lambda data: repr(data[:12]),
)
def test_of_a_file_without_entries_nothing_is_left(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / H200.file_name
    assert_set_aside(path, damaged, [])


def test_what_lies_between_damaged_lines_is_rescued(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    head, (first, second, third), tail = (
        data.splitlines(keepends=True)[:3],
        data.splitlines(keepends=True)[3:6],
        data.splitlines(keepends=True)[6:],
    )
    body = [first, second, third, *tail]
    for damaged, rescued in {
        # Half of a line.
        b"".join([*head, first, second[: len(second) // 2], third, *tail]): [KNOWN[0]],
        b"".join([*head, first, second[: len(second) // 2] + b"\n", third, *tail]): [
            *(KNOWN[0], KNOWN[2])
        ],
        # A block of zeros, as after a power failure.
        b"".join([*head, first, b"\0" * len(second), third, *tail]): [KNOWN[0], KNOWN[2]],
        b"".join([*head, first, b"\0" * 512 + b"\n", third, *tail]): [KNOWN[0], KNOWN[2]],
        # The head lost, or its environment: each line says which it is of.
        b"".join(body): KNOWN,
        b"".join([b"\0" * 100, b"\n", *body]): KNOWN,
        b"".join([head[0], b'"environment": {"gpu": 3},\n', head[2], *body]): KNOWN,
        b"".join([head[0], b'"environment": ?,\n', head[2], *body]): KNOWN,
        # Left by a merge of versions.
        b"".join([*head, b"<<<<<<< ours\n", first, b"=======\n", second, third, *tail]): KNOWN,
        # Something behind the end.
        data + b"more": KNOWN,
        data + data: KNOWN,
        # A comma too many, or none.
        data[:-4] + b",\n}}\n": KNOWN,
        data.replace(b"},\n", b"}\n", 2): KNOWN,
    }.items():
        assert damaged != data
        assert_set_aside(path, damaged, rescued)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", "1"),
        ("version", 1.0),
        ("version", True),
        ("version", 0),
        ("version", None),
        ("environment", None),
        ("environment", {"gpu": "NVIDIA H200"}),
        ("environment", {**H200.to_json(), "multiprocessors": "132"}),
        ("surprise", 1),
    ],
)
def test_wrong_types_around_the_entries(tmp_path: Path, field: str, value: object) -> None:
    path, data = written(tmp_path)
    tree = {**json.loads(data), field: value}
    assert_set_aside(path, json.dumps(tree).encode(), KNOWN)


@pytest.mark.parametrize("decisions", [None, [], "none", 3])
def test_decisions_of_a_wrong_type(tmp_path: Path, decisions: object) -> None:
    path, data = written(tmp_path)
    tree = {**json.loads(data), "decisions": decisions}
    assert_set_aside(path, json.dumps(tree).encode(), [])


@pytest.mark.parametrize("value", [None, 3, "text", [1], True])
def test_an_entry_that_is_no_object(tmp_path: Path, value: object) -> None:
    path, data = written(tmp_path)
    lines = data.splitlines(keepends=True)
    lines[4] = json.dumps(KNOWN[1].key).encode() + b": " + json.dumps(value).encode() + b",\n"
    assert_set_aside(path, b"".join(lines), [KNOWN[0], KNOWN[2]])


# A file that is whole, with entries that are not to be served


def served_otherwise(path: Path, line: bytes) -> tuple[Store, list[str]]:
    """With ``line`` in the place of the second one; opening says nothing, the lookup does."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = line + b",\n"
    path.write_bytes(b"".join(lines))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store(path, H200)
        assert not caught
        assert store.find(KNOWN[1].problem) is None
        assert store.find(KNOWN[1].problem) is None
        assert list(Store(path, H200)) == [KNOWN[0], KNOWN[2]]
    assert not aside(path)
    return store, [str(warning.message) for warning in caught]


def entry_of(path: Path, number: int) -> tuple[bytes, dict[str, Any]]:
    line = path.read_bytes().splitlines()[3 + number].removesuffix(b",")
    name = line[: line.index(b'"', 1) + 1]
    return name, json.loads(line[len(name) + 2 :])


@pytest.mark.parametrize(
    "change",
    [
        {"problem": decision(9).to_json()["problem"]},
        {"problem": None},
        {"sampling": "race"},
        {"benchmark_limit": 10},
        {"environment": L4.digest},
        {"environment": None},
        {"selection": {"ranking": []}},
        {"selection": "__import__('os').system('true')"},
        {"rejected": [[]]},
        {"code": "import os"},
    ],
    ids=str,
)
def test_an_entry_that_is_not_what_its_name_says_is_not_served(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path, _ = written(tmp_path)
    name, value = entry_of(path, 1)
    changed = name + b": " + json.dumps({**value, **change}).encode()
    store, said = served_otherwise(path, changed)
    assert len(said) == 1
    assert "is not served" in said[0]
    # What is put in takes its place.
    store.add([KNOWN[1]])
    assert sorted(known.key for known in Store(path, H200)) == sorted(k.key for k in KNOWN)


@pytest.mark.parametrize(
    "value",
    [
        *(b"{1}", b'{"a": }', b"{\0}", b"{\xff}", b'{"a":' * 50_000 + b"}"),
        # Python's own limit is met in what reads it, or in what tells of it.
        b'{"environment":"%s","problem":' % H200.digest.encode() + b"[" * 900 + b"]" * 900 + b"}",
    ],
    ids=lambda value: repr(value[:12]),
)
def test_damage_that_only_a_lookup_shows(tmp_path: Path, value: bytes) -> None:
    """Opening does not parse the entries."""
    path, data = written(tmp_path)
    name, _ = entry_of(path, 1)
    lines = data.splitlines()
    lines[4] = name + b": " + value + b","
    assert_set_aside(path, b"\n".join([*lines, b""]), [KNOWN[0], KNOWN[2]])
    path.write_bytes(b"\n".join([*lines, b""]))
    store = Store(path, H200)
    assert store.find(KNOWN[0].problem) == KNOWN[0]
    assert len(aside(path)) == 1
    with pytest.warns(UserWarning, match="damaged"):
        assert store.find(KNOWN[1].problem) is None
    assert len(aside(path)) == 2
    store.add([KNOWN[1]])
    assert len(Store(path, H200)) == 3
    path.write_bytes(b"\n".join([*lines, b""]))
    store = Store(path, H200)
    with pytest.warns(UserWarning, match="damaged"):
        store.add([KNOWN[1]])
    assert len(json.loads(path.read_bytes())["decisions"]) == 3


def test_an_entry_of_another_gpu_pasted_in_is_not_served(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    foreign = Store(tmp_path / "other", L4)
    foreign.add([measured_otherwise(KNOWN[1], 99.0, day=30)])
    line = foreign.path.read_bytes().splitlines()[3]
    served_otherwise(path, line)


def test_of_entries_that_are_there_twice_the_one_that_prevails_counts(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    later = measured_otherwise(KNOWN[1], 0.5, day=20)
    other = Store(tmp_path / "other", H200)
    other.add([later])
    new = other.path.read_bytes().splitlines()[3]
    lines = data.splitlines()
    bad = new[: new.index(b"{") + 1] + b"}"
    for order in ([new, lines[4][:-1]], [lines[4][:-1], new], [bad, new, lines[4][:-1], bad]):
        repeated = [*lines[:4], *(line + b"," for line in order), *lines[5:], b""]
        path.write_bytes(b"\n".join(repeated))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store = Store(path, H200)
            assert list(store) == [KNOWN[0], later, KNOWN[2]]
            store.add([decision(4)])
            assert list(Store(path, H200)) == [KNOWN[0], later, KNOWN[2], decision(4)]


@pytest.mark.parametrize("value", [b"{1}", b'{:"out"}'], ids=str)
def test_a_damaged_entry_beside_a_sound_one_of_its_name(tmp_path: Path, value: bytes) -> None:
    """Nobody would look it up, and the file would be no JSON for ever."""
    path, data = written(tmp_path)
    name, _ = entry_of(path, 1)
    lines = data.splitlines()
    lines.insert(4, name + b": " + value + b",")
    assert_set_aside(path, b"\n".join([*lines, b""]), KNOWN)
    lines[4], lines[5] = lines[5], lines[4]
    assert_set_aside(path, b"\n".join([*lines, b""]), KNOWN)


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
        warnings.simplefilter("error")  # it has been said
        again.put(problem(size=1), selection(FRONTIER[:1]))
        assert again.get(problem(size=1)) == selection(FRONTIER[:1])
        assert again.discard(again) == 1
        again.add([decision(4)])
    assert list(again) == [decision(4)]
    assert path.read_bytes() == data
    assert not aside(path)
    # Once it is out of the way, what is in memory is written.
    path.unlink()
    again.add([decision(3)])
    assert again.is_writable
    assert sorted(k.key for k in Store(path, H200)) == sorted(decision(n).key for n in (3, 4))


@pytest.mark.parametrize("version", [2, 17, 10**8])
def test_a_file_of_a_newer_version(tmp_path: Path, version: int) -> None:
    path, data = written(tmp_path)
    newer = data.replace(b'"version": 1', b'"version": %d' % version)
    left_alone(path, newer, f"version {version}")
    left_alone(tmp_path / "a.json", newer.replace(b"},\n", b"}, # in a form yet unknown\n"), "vers")
    left_alone(tmp_path / "b.json", newer[:200], f"version {version}")
    tree = {"decisions": {}, "version": version, "format": "cudnn-autotune store"}
    left_alone(tmp_path / "c.json", json.dumps(tree).encode(), f"version {version}")


def test_a_file_of_another_environment(tmp_path: Path) -> None:
    foreign = Store(tmp_path / "other", L4)
    foreign.add(KNOWN)
    data = foreign.path.read_bytes()
    left_alone(tmp_path / "a.json", data, "another environment (nvidia-l4_58sm")
    # Even a damaged one: it is not ours.
    left_alone(tmp_path / "b.json", data[:-9], "another environment")
    pretty = json.dumps(json.loads(data), indent=1).encode()
    left_alone(tmp_path / "c.json", pretty, "another environment")


def test_what_may_only_be_read_is_passed_over_where_it_is_of_another_environment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As it is where an application ships a file for each GPU."""
    foreign = Store(tmp_path / "other", L4)
    foreign.add(KNOWN)
    with caplog.at_level(logging.INFO, logger="cudnn_autotune"), warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(foreign.path, H200, read_only=True)
        assert list(store) == []
    (line,) = [record.message for record in caplog.records]
    assert "is not asked: it is of another environment (nvidia-l4" in line
    newer = tmp_path / "newer.json"
    newer.write_bytes(foreign.path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.warns(UserWarning, match="is not asked: it is of version 2") as said:
        Store(newer, H200, read_only=True)
    assert "memory" not in str(said[0].message)


@pytest.mark.parametrize(
    "data", [b"{}", b"[]", b"null", b'{"format": "cudnn-autotune audit", "version": 1}', b'"text"']
)
def test_json_of_another_kind(tmp_path: Path, data: bytes) -> None:
    left_alone(tmp_path / "package.json", data, "no file of 'cudnn-autotune store'")


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
        b"As it looks:\n" + entry.encode(KNOWN[0], H200) + b"\n",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_never_said_that_it_is_a_store(tmp_path: Path, data: bytes) -> None:
    left_alone(tmp_path / "notes.json", data, "no file of 'cudnn-autotune store'")
    # A store's own name says nothing of what is in the file either.
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


def test_an_empty_file_is_one_that_is_to_be(tmp_path: Path) -> None:
    """As ``tempfile`` makes it."""
    path = tmp_path / "made.json"
    path.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(path, H200)
        assert store.is_writable
        store.add([decision(1)])
    assert list(Store(path, H200)) == [decision(1)]
    assert not aside(path)


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.warns(UserWarning, match=f"left alone.*{1 << 28} bytes.*{1 << 40}"):
        store = Store(path, H200)
    assert not store.is_writable
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        store.add([decision(1)])
        assert list(store) == [decision(1)]
    assert path.stat().st_size == 1 << 40


# Saying it


def test_it_is_logged_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, data = written(tmp_path)
    path.write_bytes(data[:-30])
    with caplog.at_level(logging.INFO, logger="cudnn_autotune"):
        _, said = opened(path)
    assert [record.message for record in caplog.records] == said
    # The warning reaches whoever has no handler for logs; once is enough.
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_the_warning_is_of_the_users_line(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    path.write_bytes(data[:-30])
    with pytest.warns(UserWarning, match="damaged") as said:
        Store(path, H200)
    assert said[0].filename == __file__


def test_what_must_not_be_touched_is_said_once_and_served(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    path.write_bytes(data[:-30])
    for count in (1, 0, 0):
        store, said = opened(path, read_only=True)
        assert len(said) == count
        assert list(store) == KNOWN[:2]
    assert path.read_bytes() == data[:-30]
    assert not aside(path)


def test_it_is_said_again_of_new_damage(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    assert_set_aside(path, data[:-30], KNOWN[:2])
    assert_set_aside(path, data[: -len(data) // 3], KNOWN[:1])
    assert_set_aside(path, data[:-30], KNOWN[:2])
    assert len(aside(path)) == 3


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
