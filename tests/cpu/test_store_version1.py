"""Files of version 1 of the format are read and served; the next change converts them."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from decisions import H200, L4, at_limit, decision, problem, version1
from stored import layer, run, simulation, succeeded

from cudnn_autotune.store import Decision, Store

KNOWN = [decision(n) for n in (1, 2, 3)]
# Version 0.1.0 of the package has written this file.
WRITTEN = Path(__file__).parents[1] / "data" / "store_version1.json"


def opened(path: Path) -> tuple[Store, list[str]]:
    """Opens a store and returns it with the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store = Store(path, H200)
        list(store)
    return store, [str(warning.message) for warning in caught]


def aside(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


def without_times(known: Decision) -> list[str]:
    return [entry.candidate.text for entry in known.selection.ranking]


def test_a_file_that_was_written_then(tmp_path: Path) -> None:
    path = tmp_path / H200.file_name
    shutil.copy(WRITTEN, path)
    data = path.read_bytes()
    simulated = replace(simulation("h200-capped", layer("dgrad"), "sustained"), sampling="auto")
    rejected = decision(1, rejected=(("strict", 0.5), ("slow", float("inf"))))
    capped = at_limit(1 << 12, size=2)
    strict = at_limit(None, size=2, deterministic=True)
    store, said = opened(tmp_path)
    assert said == []
    first, *others = store
    assert others == [rejected, capped, strict]
    assert without_times(first) == without_times(simulated)
    assert store.find(strict.problem) == strict
    assert path.read_bytes() == data  # reading changes nothing
    store.add([decision(3)])
    assert path.read_bytes().startswith(b'{"format": "cudnn-autotune store", "version": 2, ')
    assert not aside(path)
    for known in (store, Store(tmp_path, H200)):
        assert [one.key for one in known] == [
            one.key for one in (first, rejected, capped, strict, decision(3))
        ]
        assert list(known)[1:] == [rejected, capped, strict, decision(3)]
        assert known.find(strict.problem) == strict


def test_the_first_version_leaves_the_second_alone(tmp_path: Path) -> None:
    """It looks for the version in these bytes and no others."""
    store = Store(tmp_path, H200)
    store.add(KNOWN)
    assert store.path.read_bytes().startswith(b'{"format": "cudnn-autotune store", "version": 2,')


@pytest.mark.parametrize(
    "layout",
    [
        lambda data: data,
        lambda data: json.dumps(json.loads(data), indent=2).encode(),
        lambda data: json.dumps(json.loads(data), separators=(",", ":")).encode(),
        lambda data: json.dumps(json.loads(data), sort_keys=True).encode(),
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.rstrip(),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.decode().encode("utf-16"),
    ],
)
def test_layouts_of_the_same_json(tmp_path: Path, layout: object) -> None:
    path = tmp_path / "store.json"
    assert callable(layout)
    data = layout(version1(KNOWN))
    path.write_bytes(data)
    store, said = opened(path)
    assert (list(store), said) == (KNOWN, [])
    assert path.read_bytes() == data
    store.add([decision(4)])
    assert list(Store(path, H200)) == [*KNOWN, decision(4)]
    assert not aside(path)


def test_what_is_put_in_counts_as_in_any_file(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_bytes(version1([decision(1, day=2), decision(2, day=2)]))
    store = Store(path, H200)
    store.add([decision(1, day=1), decision(2, day=3)])
    assert list(Store(path, H200)) == [decision(1, day=2), decision(2, day=3)]
    path.write_bytes(version1(KNOWN))
    assert store.discard([KNOWN[0]]) == 1
    assert list(Store(path, H200)) == KNOWN[1:]


def test_of_another_environment(tmp_path: Path) -> None:
    data = version1(KNOWN, L4)
    path = tmp_path / "store.json"
    path.write_bytes(data)
    store, said = opened(path)
    assert "another environment (nvidia-l4_58sm" in said[0]
    store.add([decision(4)])
    assert path.read_bytes() == data


def damages() -> dict[str, tuple[bytes, list[Decision]]]:
    data = version1(KNOWN)
    lines = data.splitlines(keepends=True)
    head, (first, second, third), tail = lines[:3], lines[3:6], lines[6:]
    half = second[: len(second) // 2]
    ends = len(data) - 30
    return {
        "truncated": (data[:ends], KNOWN[:2]),
        "half of a line": (b"".join([*head, first, half + b"\n", third, *tail]), KNOWN[::2]),
        "zeros": (b"".join([*head, first, b"\0" * len(second), third, *tail]), KNOWN[::2]),
        "zeros in a line": (b"".join([*head, first, b"\0\n", third, *tail]), KNOWN[::2]),
        "no head": (b"".join([first, second, third, *tail]), KNOWN),
        "no environment": (b"".join([head[0], b'"environment": ?,\n', *lines[2:]]), KNOWN),
        "another field": (data.replace(b'"decisions"', b'"surprise": 1, "decisions"', 1), KNOWN),
        "no entry": (data.replace(third, third.partition(b": ")[0] + b": 3\n"), KNOWN[:2]),
        "joined": (data + data, KNOWN),
    }


@pytest.mark.parametrize("name", damages())
def test_what_is_intact_in_a_damaged_one_is_kept(tmp_path: Path, name: str) -> None:
    data, intact = damages()[name]
    path = tmp_path / "store.json"
    path.write_bytes(data)
    store, (said,) = opened(path)
    assert "damaged" in said
    assert [file.read_bytes() for file in aside(path)] == [data]
    assert list(store) == intact
    assert opened(path)[1] == []
    store.add([decision(4)])
    assert list(Store(path, H200)) == [*intact, decision(4)]


def test_an_entry_that_cannot_be_read_is_not_lost(tmp_path: Path) -> None:
    """It stays in the file that is set aside."""
    data = version1(KNOWN).replace(b'"sampling": "auto", "bench', b'"sampling": 7, "bench', 1)
    path = tmp_path / "store.json"
    path.write_bytes(data)
    store, (said,) = opened(path)
    assert "is not served" in said
    assert not aside(path)
    with pytest.warns(UserWarning, match="damaged"):
        store.add([decision(4)])
    assert [file.read_bytes() for file in aside(path)] == [data]
    assert list(Store(path, H200)) == [*KNOWN[1:], decision(4)]


def test_the_commands_read_it(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.json"
    shipped.write_bytes(version1(KNOWN))
    assert "3 of 3 decisions" in succeeded("show", "--store", shipped)
    assert "3 new" in succeeded("import", shipped, "--store", tmp_path / "made.json")
    assert list(Store(tmp_path / "made.json", H200)) == KNOWN
    assert run("diff", shipped, tmp_path / "made.json").exit_code == 0
    assert list(Store(shipped, H200, read_only=True)) == KNOWN
    assert shipped.read_bytes() == version1(KNOWN)
    assert Store(shipped, H200).get(problem(size=1)) == KNOWN[0].selection
