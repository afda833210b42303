"""A text with half of a surrogate pair is refused where it is read, wherever it stands.

JSON may hold one by an escape, such as ``"\\ud800"``. It is a str of Python, but no encoding and no
function of the extension takes it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decisions import EVIDENCE, H200, decision, problem, resealed, selection, timed
from stored import run

import cudnn_autotune as ca
from cudnn_autotune.core import json_dataclass
from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import Decision, Environment, Store, codec, file_format, peaks_file

PEAKS = {"bytes_per_ms": 1.0, "launch_ms": 1.0}
LONE = ("\ud800", "\udfff", "eng0:K=1\udc80", "\udc00\ud800")
WHOLE = ("\u00b5", "\U0001f600", "\ue000")  # a whole pair is an escape in JSON, too
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


def texts(
    tree: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Yields the place of each text in a tree; with True, of the name in an object."""
    if isinstance(tree, str):
        yield path, False
    elif isinstance(tree, (dict, list)):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(tree, dict):
                yield (*path, name), True
            yield from texts(value, (*path, name))


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
# Fields of a decision that are not known are passed over, whatever their names are.
PLACES = [
    (path, is_name)
    for path, is_name in texts(LINE)
    if path != ("crc32",) and not (is_name and len(path) == 2)
]


def line_of(tree: Any) -> bytes:
    return resealed(json.dumps(tree, separators=(",", ":")).encode())


def test_the_places_are_those_of_the_tests_line() -> None:
    """The list is not empty by a mistake, and its unchanged line is read."""
    assert {path[1] for path, _ in PLACES if len(path) > 1} >= {
        "evidence", "provenance", "ranking", "rejected"
    }  # fmt: skip
    assert codec.decode(line_of(LINE), H200) == FULL


@pytest.mark.parametrize("text", LONE)
@pytest.mark.parametrize(("path", "is_name"), PLACES, ids=repr)
def test_a_decision_with_one_is_not_served(
    path: tuple[str | int, ...], is_name: bool, text: str
) -> None:
    with pytest.raises(ValueError):
        codec.decode(line_of(changed(LINE, path, is_name, text)), H200)


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


def test_a_name_with_one_is_no_key(tmp_path: Path) -> None:
    """All keys of a store can be printed and compared."""
    name = LINE["name"].replace("auto", "\ud800")
    path = tmp_path / "store.json"
    path.write_bytes(file_format.encode(H200, [line_of({**LINE, "name": name})]))
    store = Store(path, H200)
    assert len(store) == 1
    (key,) = list(store.keys())
    key.encode()
    assert store.by_key(key) is None


@pytest.mark.parametrize("text", LONE)
@pytest.mark.parametrize("field", ["gpu", "compute_capability", "mig_profile", "cudnn"])
def test_an_environment_with_one_is_damage(tmp_path: Path, field: str, text: str) -> None:
    head, line, _ = file_format.encode(H200, [codec.encode(FULL, H200)]).split(b"\n")
    tree = json.loads(head)
    tree["environment"][field] = text
    path = tmp_path / "store.json"
    path.write_bytes(json.dumps(tree).encode() + b"\n" + line + b"\n")
    with pytest.warns(UserWarning, match="damaged"):
        assert list(Store(path, H200)) == [FULL]
    assert file_format.decode(path.read_bytes()).environment in (H200, None)
    with pytest.raises(ValueError, match="valid Unicode"):
        Environment.from_json(tree["environment"])


@pytest.mark.parametrize("text", LONE)
def test_peaks_with_one_are_not_used(tmp_path: Path, text: str) -> None:
    peaks_file.keep(tmp_path, H200, Peaks(1.0, {"float64": 1.0}, 1.0))
    path = peaks_file.path_of(tmp_path, H200)
    tree = json.loads(path.read_bytes())
    for place, is_name in list(texts(tree)):
        path.write_text(json.dumps(changed(tree, place, is_name, text)))
        assert peaks_file.find(tmp_path, H200) is None
    path.write_text(json.dumps(tree))
    assert peaks_file.find(tmp_path, H200) is not None


@pytest.mark.parametrize("text", LONE)
def test_a_pin_to_one_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="engine_text: must be a text of valid Unicode"):
        ca.pin(problem(), text)
    assert problem() not in ca.pins()


@pytest.mark.parametrize("text", WHOLE)
def test_what_is_valid_is_read(text: str) -> None:
    assert Node(text, "place").text() == text
    assert list(Node({text: 1}, "place").object()) == [text]
    provenance = dataclasses.replace(FULL.provenance, driver=text)
    kept = dataclasses.replace(FULL, provenance=provenance)
    assert codec.decode(codec.encode(kept, H200), H200) == kept


def test_a_name_of_a_mapping_with_one_is_refused() -> None:
    with pytest.raises(ValueError, match="valid Unicode"):
        json_dataclass.decode(Peaks, {**PEAKS, "flops_per_ms": {"\ud800": 1.0}})


def test_a_decision_with_one_cannot_be_added(tmp_path: Path) -> None:
    """A mode of a user may say anything; nothing is written then."""
    spoilt: Decision = dataclasses.replace(
        FULL, selection=selection([timed("eng1\ud800", 1.0, rank=1)])
    )
    store = Store(tmp_path, H200)
    with pytest.raises(ValueError, match="valid Unicode"):
        store.add([spoilt])
    assert len(store) == 0
