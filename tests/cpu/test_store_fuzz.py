"""Whatever is in a file: a store opens it, serves no entry under another's name or another
environment's, and can be used. Nothing in it is executed."""

from __future__ import annotations

import ast
import copy
import json
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from decisions import H200, L4, at_limit, decision, problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudnn_autotune.store
from cudnn_autotune.store import Decision, Environment, Store, entry, file_format, layout
from cudnn_autotune.store.neighbours import nearest

KNOWN = [decision(1), at_limit(1 << 12, size=2), at_limit(None, size=2, deterministic=True)]
LINES = [entry.encode(known, H200) for known in KNOWN]
FILE = layout.encode(H200, LINES)
TREE: dict[str, Any] = json.loads(FILE)
FOREIGN = layout.encode(L4, [entry.encode(known, L4) for known in KNOWN])

often = settings(max_examples=300, deadline=None)
on_disk = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "store.json")
        path.write_bytes(data)
        yield path


def served(data: bytes) -> list[Decision]:
    """What a store that may only read finds in a file, by every way of asking."""
    with file_of(data) as path:
        store = Store(path, H200, read_only=True)
        found = list(store)
        assert {known.key for known in found} <= set(store.keys())
        for known in found:
            assert known.key in store
            by_key = store.by_key(known.key)
            assert by_key is not None
            assert by_key.key == known.key
            answer = store.find(
                known.problem,
                sampling=known.sampling,
                benchmark_limit=known.benchmark_limit,
                workspace_limit=known.workspace_limit,
            )
            assert answer is None or answer.problem == known.problem
            assert Decision.from_json(json.loads(json.dumps(known.to_json()))) == known
        for known in KNOWN:
            store.get(known.problem)
        # As remembering.similar asks.
        for key in nearest(problem(size=48), store.keys()):
            store.by_key(key)
        assert path.read_bytes() == data
        return found


def assert_usable(data: bytes) -> None:
    """It opens, takes a decision, and the next process finds that."""
    with file_of(data) as path:
        store = Store(path, H200)
        before = list(store)
        new = decision(77)
        store.add([new])
        assert store.find(problem(size=77)) is not None
        assert {known.key for known in before} | {new.key} <= {known.key for known in store}
        if store.is_writable:
            assert list(Store(path, H200)) == list(store)
            json.loads(path.read_bytes())
        else:
            assert path.read_bytes() == data


@often
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    assert served(data) == []


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A file of ours, or of another environment, damaged at one place or a few."""
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
                st.sampled_from([LINES[0], LINES[1] + b",\n", FOREIGN, FOREIGN[300:900]]),
            )
        )
    return bytes(data)


@often
@given(mutated())
def test_a_damaged_file(data: bytes) -> None:
    for known in served(data):
        # A digit may have become another; a problem, or who measured it, has not.
        assert known.key in {k.key for k in KNOWN} or known.key.encode() in data


NAMES = [
    match.span() for match in re.finditer(rb'^"(?:fprop|dgrad|wgrad) [^"]*"(?=: )', FILE, re.M)
]


@often
@given(st.sampled_from(NAMES), st.data())
def test_a_damaged_name(span: tuple[int, int], drawn: st.DataObject) -> None:
    place = drawn.draw(st.integers(span[0] + 1, span[1] - 2))
    new = drawn.draw(
        st.sampled_from([b"0", b"9", b"x", b"_", b"-", b" ", b"=", b"", b"\\", b"\xff"])
    )
    served(FILE[:place] + new + FILE[place + 1 :])


def test_names_are_there_to_be_damaged() -> None:
    assert len(NAMES) == len(KNOWN)


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


PLACES = list(places(TREE))


@st.composite
def mutated_tree(draw: st.DrawFn) -> Any:
    tree = copy.deepcopy(TREE)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(PLACES))
        try:
            inner = tree
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
                value: Any = TREE
                for name in other:
                    value = value[name]
                inner[path[-1]] = copy.deepcopy(value)
        except (AttributeError, IndexError, KeyError, TypeError):
            continue  # an earlier change has taken that place away
    return tree


def laid_out(tree: Any, in_lines: bool) -> bytes:
    """The tree as a store writes it, if that is possible; else on one line."""
    if in_lines and isinstance(tree, dict) and isinstance(tree.get("decisions"), dict):
        entries = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(value)}" for name, value in tree["decisions"].items()
        )
        head = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(value)}"
            for name, value in tree.items()
            if name != "decisions"
        )
        head = head.replace(f",\n{json.dumps('version')}", ', "version"')
        return f'{{{head},\n"decisions": {{\n{entries}\n}}}}\n'.encode()
    return json.dumps(tree).encode()


def test_the_layout_of_this_test_is_the_stores() -> None:
    assert file_format.decode(laid_out(TREE, True), H200).data == laid_out(TREE, True)
    assert served(laid_out(TREE, True)) == served(laid_out(TREE, False)) == served(FILE) == KNOWN


@often
@given(mutated_tree(), st.booleans())
def test_another_tree(tree: Any, in_lines: bool) -> None:
    for known in served(laid_out(tree, in_lines)):
        # Only under its own name, and only if it says that it is of this environment.
        value = tree["decisions"][json.loads(entry.name_of(known))]
        assert value["environment"] == H200.digest
        own = {name: inner for name, inner in value.items() if name != "environment"}
        assert Decision.from_json(own) == known
        if isinstance(tree.get("environment"), dict) and set(tree["environment"]) == set(
            TREE["environment"]
        ):
            with_other_types = tree["environment"] != TREE["environment"]
            assert not with_other_types or not _is_environment(tree["environment"])


def _is_environment(tree: Any) -> bool:
    try:
        Environment.from_json(tree)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(st.binary(max_size=300), id="any bytes"),
        pytest.param(mutated(), id="a damaged file"),
        pytest.param(st.builds(laid_out, mutated_tree(), st.booleans()), id="another tree"),
    ],
)
@on_disk
@given(drawn=st.data())
def test_a_store_is_usable_after(files: st.SearchStrategy[bytes], drawn: st.DataObject) -> None:
    assert_usable(drawn.draw(files))


@often
@given(json_values)
def test_any_json_is_a_decision_or_a_value_error(tree: Any) -> None:
    for read in (Decision.from_json, Environment.from_json):
        with pytest.raises(ValueError):
            read(tree)


@pytest.mark.parametrize("depth", [900, 5_000, 200_000])
def test_however_deep(depth: int) -> None:
    """Each place of a file, nested: Python's own limit is met somewhere on the way."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    flat = b"[" * depth + b"]" * depth
    tagged = TREE["decisions"][json.loads(entry.name_of(KNOWN[1]))]
    for inner in (deep, flat):
        assert served(inner) == []
        for field in tagged:
            nested = json.dumps({**tagged, field: "?"}).encode().replace(b'"?"', inner)
            line = entry.name_of(KNOWN[1]) + b": " + nested
            assert served(layout.encode(H200, [LINES[0], line])) == KNOWN[:1]
        name = json.dumps(decision(3).key).encode()
        assert served(layout.encode(H200, [LINES[0], name + b": " + deep])) == KNOWN[:1]
        for place in (b'"environment"', b'"version"', b'"decisions"', b'"engine"'):
            served(FILE.replace(place + b": ", place + b": " + inner + b", ", 1))
            served(FILE.replace(place + b":", place + b":" + inner + b",", 1))


def test_nothing_in_the_package_could_execute_what_it_reads() -> None:
    folder = Path(cudnn_autotune.store.__file__).parent
    forbidden = {"eval", "exec", "compile", "__import__", "pickle", "marshal", "importlib", "runpy",
                 "ctypes", "subprocess", "shelve", "dill", "load"}  # fmt: skip
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: set[str] = set()
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name.split(".")[0] for alias in node.names}
                names.add((getattr(node, "module", None) or "").split(".")[0])
            elif isinstance(node, ast.Call):
                function = node.func
                name = function.attr if isinstance(function, ast.Attribute) else None
                names = {name or getattr(function, "id", "")}
                if names == {"compile"} and ast.unparse(function) == "re.compile":
                    continue
            assert not names & forbidden, f"{file.name}: {ast.unparse(node)}"
