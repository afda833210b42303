"""A store opens a file with any content, and remains usable.

It serves no entry under another name, or of another environment, and executes nothing in the file.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store.decisions import H200, L4, at_limit, decision, problem, resealed
from support.store.nearest import nearest

from cudnn_autotune.store import codec, file_format
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Store

KNOWN = [decision(1), at_limit(1 << 12, size=2), at_limit(None, size=2, deterministic=True)]
LINES = [codec.encode(known, H200) for known in KNOWN]
FILE = file_format.encode(H200, LINES)
FOREIGN = file_format.encode(L4, [codec.encode(known, L4) for known in KNOWN])
TREES: list[Any] = [json.loads(line) for line in FILE.splitlines()]

often = settings(max_examples=3 * settings.default.max_examples)


@contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "store.json")
        path.write_bytes(data)
        yield path


def served(data: bytes) -> list[Decision]:
    """Returns what a read-only store finds in a file, and asks it in every way."""
    with file_of(data) as path:
        store = Store(path, H200, read_only=True)
        found = list(store)
        assert {known.key for known in found} <= set(store.keys())
        for known in found:
            assert known.key in store
            assert store.by_key(known.key).key == known.key
            answer = store.find(
                known.problem,
                sampling=known.sampling,
                benchmark_limit=known.benchmark_limit,
                workspace_limit=known.workspace_limit,
            )
            assert answer is None or answer.problem == known.problem
            assert codec.decode(codec.encode(known, H200), H200) == known
            json.dumps(known.to_json(), allow_nan=False)
        for known in KNOWN:
            store.get(known.problem)
        # remembering.similar asks in this way.
        for key in nearest(problem(size=48), store.keys()):
            store.by_key(key)
        assert path.read_bytes() == data
        return found


def assert_usable(data: bytes) -> None:
    """Asserts that a store opens the file and takes a decision that the next store finds."""
    with file_of(data) as path:
        store = Store(path, H200)
        before = list(store)
        new = decision(77)
        store.add([new])
        assert store.find(problem(size=77)) is not None
        assert {known.key for known in before} | {new.key} <= {known.key for known in store}
        if store.is_writable:
            assert list(Store(path, H200)) == list(store)
            for line in filter(bytes.strip, path.read_bytes().splitlines()):
                json.loads(line)
        else:
            assert path.read_bytes() == data


@often
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    assert served(data) == []


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Returns a store's file, of this environment or another, with damage at up to four places."""
    data = bytearray(draw(st.sampled_from([FILE, FILE, FILE, FOREIGN])))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 1, 2, 30, 500, 5000])))
        part = bytes(data[start:end])
        data[start:end] = draw(
            st.one_of(
                st.binary(max_size=20),
                st.just(b""),
                st.just(part * 2),
                st.just(b"\0" * len(part)),
                st.sampled_from([b"\n", b'"', b"}", b"{", b",", b"},\n", b"}}\n", b"[[[["]),
                st.sampled_from([LINES[0], LINES[1] + b"\n", FOREIGN, FOREIGN[300:900]]),
            )
        )
    return bytes(data)


@often
@given(mutated())
def test_a_damaged_file(data: bytes) -> None:
    for known in served(data):
        # A key that is not known must stand in the file: no key is invented.
        assert known.key in {k.key for k in KNOWN} or known.key.encode() in data


@often
@given(st.sampled_from(LINES), st.data())
def test_a_damaged_line(line: bytes, drawn: st.DataObject) -> None:
    """The checksum detects a change of any byte."""
    place = drawn.draw(st.integers(0, len(line) - 1))
    new = drawn.draw(st.binary(max_size=2).filter(lambda new: new != line[place : place + 1]))
    damaged = line[:place] + new + line[place + 1 :]
    known = KNOWN[LINES.index(line)]
    assert known not in served(FILE.replace(line, damaged))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["fprop", "float16", "auto", "2026-01-01T00:00:00Z", H200.digest]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    if isinstance(tree, (dict, list)):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(value, (*path, name))


PLACES = list(places(TREES))


@st.composite
def mutated_trees(draw: st.DrawFn) -> list[Any]:
    trees = copy.deepcopy(TREES)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(PLACES))
        try:
            inner: Any = trees
            for name in path[:-1]:
                inner = inner[name]
            what = draw(st.sampled_from(["replace", "delete", "rename", "copy"]))
            if what == "replace":
                inner[path[-1]] = draw(json_values)
            elif what == "delete":
                del inner[path[-1]]
            elif what == "rename":
                inner[draw(st.text(max_size=8))] = inner.pop(path[-1])
            else:
                other = draw(st.sampled_from([p for p in PLACES if len(p) == len(path)]))
                value: Any = TREES
                for name in other:
                    value = value[name]
                inner[path[-1]] = copy.deepcopy(value)
        except (AttributeError, IndexError, KeyError, TypeError):
            continue  # an earlier change has taken that place away
    return trees


def laid_out(trees: list[Any]) -> bytes:
    """Returns the trees as a store's file, with right checksums."""
    head, *lines = (json.dumps(tree, separators=(",", ":")).encode() for tree in trees or [0])
    return b"\n".join([head, *map(resealed, lines), b""])


@often
@given(mutated_trees())
def test_other_trees(trees: list[Any]) -> None:
    for known in served(laid_out(trees)):
        # Only under its own name.
        name = json.loads(codec.name_of(known))
        assert any(isinstance(tree, dict) and tree.get("name") == name for tree in trees)


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(st.binary(max_size=300), id="any bytes"),
        pytest.param(mutated(), id="a damaged file"),
        pytest.param(st.builds(laid_out, mutated_trees()), id="other trees"),
    ],
)
@given(drawn=st.data())
def test_a_store_is_usable_after(files: st.SearchStrategy[bytes], drawn: st.DataObject) -> None:
    assert_usable(drawn.draw(files))


@often
@given(json_values)
def test_any_json_is_an_environment_or_a_value_error(tree: Any) -> None:
    with pytest.raises(ValueError):
        Environment.from_json(tree)
