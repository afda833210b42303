"""A store returns what was added to it, in this process and in others."""

from __future__ import annotations

import builtins
import dataclasses
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.threads import in_threads
from support.store.decisions import (
    FRONTIER,
    H200,
    L4,
    at_limit,
    decision,
    problem,
    selection,
    timed,
)

import cudnn_autotune as ca
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.file_store import Layered, Store


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No test in this file may cause a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_is_put_in_comes_out(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    assert store.get(problem()) is None
    store.put(problem(), selection(), relative_error=1e-3, rejected=[("wrong", 0.5)])
    for known in (store, Store(tmp_path, H200)):
        assert known.get(problem()) == selection()
        found = known.find(problem())
        assert (found.relative_error, found.rejected) == (1e-3, (("wrong", 0.5),))
        assert found.provenance.cudnn_autotune == ca.__version__
        assert found.key in known
        assert [*known] == [found]
        assert len(known) == 1


def test_its_text_names_the_file(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    assert repr(store) == f"Store({str(tmp_path / H200.file_name)!r})"


def test_every_field_of_a_lookup_counts(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.put(problem(), selection())
    assert store.get(problem(size=57)) is None
    assert store.get(problem(allow_reduced_precision=False)) is None
    assert store.get(problem(), sampling="race") is None
    assert store.get(problem(), benchmark_limit=10) is None
    store.put(problem(), selection(FRONTIER[:1]), sampling="race", benchmark_limit=10)
    assert store.get(problem(), sampling="race", benchmark_limit=10) == selection(FRONTIER[:1])
    assert store.get(problem()) == selection()


def test_a_decision_holds_for_one_depthwise_kernel_of_pytorch(tmp_path: Path) -> None:
    """PyTorch's own path, a candidate of each race, has another time with another one."""
    auto = ca.ConvProblem("fprop", (2, 8, 9, 9), (8, 1, 3, 3), groups=8)
    native = dataclasses.replace(auto, depthwise_kernel="native")
    Store(tmp_path, H200).put(auto, selection())
    store = Store(tmp_path, H200)
    assert store.get(auto) == selection()
    assert store.get(native) is None
    store.put(native, selection(FRONTIER[:1]))
    known = Store(tmp_path, H200)
    assert (known.get(auto), known.get(native)) == (selection(), selection(FRONTIER[:1]))
    assert native in {decision.problem for decision in known}


def test_other_constraints_rank_again_and_time_nothing(tmp_path: Path) -> None:
    Store(tmp_path, H200).put(problem(), selection())
    store = Store(tmp_path, H200)
    assert store.get(problem(deterministic=True)).winner == FRONTIER[2]
    assert store.get(problem(), workspace_limit=1 << 12).winner == FRONTIER[1]
    both = store.get(problem(deterministic=True), workspace_limit=5)
    assert both.winner == FRONTIER[3]
    assert both.evidence.rule == "re-ranked: fastest"
    assert store.get(problem()) == selection()


def test_the_file_is_json_with_an_entry_a_line(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    assert not store.path.exists()
    store.add([decision(1), decision(2, rejected=(("wrong", float("nan")),))])
    head, *lines = map(json.loads, store.path.read_text(encoding="ascii").splitlines())
    assert head["format"] == "cudnn-autotune store"
    assert head["version"] == 2
    assert head["environment"] == H200.to_json()
    assert [line["name"] for line in lines] == [decision(1).key, decision(2).key]
    winner = dict(zip(head["ranking"], lines[0]["decision"]["ranking"][0], strict=False))
    assert winner["text"] == "fastest"
    assert winner["time_ms"] == 1.0
    assert store.discard(store) == 2
    gone = [json.loads(line) for line in store.path.read_text().splitlines()[-2:]]
    assert [line["decision"] for line in gone] == [None, None]
    assert len(Store(tmp_path, H200)) == 0


def test_a_change_is_appended(tmp_path: Path) -> None:
    """What the file holds is not written again."""
    store = Store(tmp_path, H200)
    store.add(decision(n) for n in range(1, 20))
    inode = store.path.stat().st_ino
    data = store.path.read_bytes()
    later = decision(1, day=2)
    for change in (
        lambda: store.add([decision(20)]),
        lambda: store.add([later]),
        lambda: store.discard([decision(2)]),
        lambda: store.reject(store.find(problem(size=3))),  # type: ignore[arg-type]
    ):
        before = store.path.read_bytes()
        change()
        assert store.path.read_bytes().startswith(before)
        assert store.path.read_bytes().count(b"\n") == before.count(b"\n") + 1
    assert store.path.stat().st_ino == inode
    assert store.path.read_bytes().startswith(data)
    fresh = list(Store(tmp_path, H200))
    assert fresh[0] == later
    assert [known.key for known in fresh] == [decision(n).key for n in (1, *range(3, 21))]


def test_once_most_lines_no_longer_count_the_file_is_written_anew(tmp_path: Path) -> None:
    store, other = Store(tmp_path, H200), Store(tmp_path, H200)
    store.add([decision(1), decision(2)])
    for n in range(150):
        store.put(problem(size=1), selection(FRONTIER[: 1 + n % 3]))
        assert other.by_key(decision(3).key) is None  # a miss looks at the file
        assert other.get(problem(size=1)) == selection(FRONTIER[: 1 + n % 3])
    assert len(store.path.read_bytes().splitlines()) < 100
    (tmp_path / "copy").mkdir()
    assert [*other] == [*store] == [*Store(tmp_path, H200)]
    assert len(store) == 2


def test_a_file_that_took_the_place_of_another_is_read_anew(tmp_path: Path) -> None:
    """This holds even if it has the same size and the same last line."""
    store = Store(tmp_path, H200)
    store.add([decision(1), decision(3)])
    other = Store(tmp_path / "other", H200)
    other.add([decision(2), decision(3)])
    assert other.path.stat().st_size == store.path.stat().st_size
    other.path.replace(store.path)
    assert list(store) == [decision(2), decision(3)]
    store.path.write_bytes(store.path.read_bytes())  # in place
    assert list(store) == [decision(2), decision(3)]
    store.add([decision(4)])
    assert list(Store(tmp_path, H200)) == [decision(n) for n in (2, 3, 4)]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_line_that_its_writer_could_not_finish(tmp_path: Path, share: float) -> None:
    """A killed writer leaves such a line; its call never returned."""
    store, other = Store(tmp_path, H200), Store(tmp_path, H200)
    store.add([decision(1), decision(2)])
    assert len(other) == 2
    data = store.path.read_bytes()
    store.add([decision(3)])
    line = store.path.read_bytes()[len(data) :]
    torn = data + line[: int(share * len(line))]
    store.path.write_bytes(torn)
    assert list(Store(tmp_path, H200)) == list(other) == [decision(1), decision(2)]
    assert store.path.read_bytes() == torn  # reading changes nothing
    other.add([decision(4)])
    assert store.path.read_bytes().startswith(data)
    for known in (store, other, Store(tmp_path, H200)):
        assert list(known) == [decision(n) for n in (1, 2, 4)]
    assert not list(tmp_path.glob("*.damaged*"))


def test_without_its_last_line_end_a_file_is_whole(tmp_path: Path) -> None:
    store, other = Store(tmp_path, H200), Store(tmp_path, H200)
    store.add([decision(1), decision(2)])
    store.path.write_bytes(store.path.read_bytes()[:-1])
    assert list(other) == list(Store(tmp_path, H200)) == [decision(1), decision(2)]
    other.add([decision(3)])
    assert list(store) == list(Store(tmp_path, H200)) == [decision(n) for n in (1, 2, 3)]


def test_what_could_not_be_read_back_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    with pytest.raises(ValueError, match="time_ms"):
        store.add([decision(1), decision(2, selection=selection([timed("eng1", -1.0)]))])
    assert len(store) == 0
    assert not store.path.exists()


def test_what_another_writes_is_seen(tmp_path: Path) -> None:
    one, other = Store(tmp_path, H200), Store(tmp_path, H200)
    one.add([decision(1)])
    assert other.by_key(decision(1).key) == decision(1)
    other.add([decision(2)])
    assert one.get(problem(size=2)) is not None
    assert one.discard([decision(2)]) == 1
    assert other.by_key(decision(2).key) == decision(2)  # a hit does not look at the disk
    assert other.by_key(decision(3).key) is None  # a miss does
    assert other.by_key(decision(2).key) is None
    one.add([decision(4)])
    assert len(other) == 2
    one.add([decision(5)])
    assert decision(5) in list(other)
    one.add([decision(6)])
    assert decision(6).key in list(other.keys())


def test_a_store_that_vanishes_is_empty_and_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "down", H200)
    store.add([decision(1)])
    store.path.unlink()
    assert store.by_key(decision(2).key) is None
    assert len(store) == 0
    store.add([decision(2)])
    assert list(Store(tmp_path / "deep" / "down", H200)) == [decision(2)]


def test_a_miss_does_not_read_a_file_that_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(1)])
    opened = []
    for module, name in ((os, "open"), (io, "open"), (builtins, "open")):
        real = getattr(module, name)

        def noted(*given: Any, real: Any = real, **named: Any) -> Any:
            opened.append(given)
            return real(*given, **named)

        monkeypatch.setattr(module, name, noted)
    assert store.get(problem(size=5000)) is None
    assert not opened
    Store(tmp_path, H200)
    assert opened, "a store that is opened reads its file"


def test_threads_share_a_store(tmp_path: Path) -> None:
    store, other = Store(tmp_path, H200), Store(tmp_path, H200)

    def work(number: int) -> None:
        mine = (store, other)[number % 2]
        for n in range(10):
            mine.add([decision(100 * number + n + 1)])
            assert mine.get(problem(size=100 * number + n + 1)) == selection()

    in_threads(4, work)
    assert len(Store(tmp_path, H200)) == 40


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "real" / "store.json")
    Store(tmp_path / "link.json", H200).add([decision(1)])
    Store(tmp_path / "real" / "store.json", H200).add([decision(2)])
    assert (tmp_path / "link.json").is_symlink()
    assert len(Store(tmp_path / "link.json", H200)) == 2


def test_read_only_leaves_the_disk_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "nowhere", H200, read_only=True)
    assert not store.is_writable
    store.add([decision(1)])
    assert store.get(problem(size=1)) == selection()
    assert not (tmp_path / "nowhere").exists()
    assert Store(tmp_path / "nowhere", H200).is_writable


# Layers


def layers(tmp_path: Path) -> Layered:
    user = Store(tmp_path / "user", H200)
    shipped = [Store(tmp_path / name, H200, read_only=True) for name in ("first", "second")]
    return Layered(user, shipped)


def test_the_users_decision_wins_over_those_that_were_shipped(tmp_path: Path) -> None:
    Store(tmp_path / "first", H200).add([decision(1, day=2), decision(2)])
    Store(tmp_path / "second", H200).add([decision(1, day=3), decision(2, day=3), decision(3)])
    layered = layers(tmp_path)
    assert layered.find(problem(size=1)) == decision(1, day=2)
    layered.add([decision(1, day=1)])
    assert layered.find(problem(size=1)) == decision(1, day=1)
    assert layered.find(problem(size=2)) == decision(2)
    assert layered.find(problem(size=3)) == decision(3)
    assert layered.find(problem(size=4)) is None
    assert layered.by_key(decision(3).key) == decision(3)
    assert layered.by_key(decision(4).key) is None
    assert list(layered.keys()) == [decision(n).key for n in (1, 2, 3)]
    assert list(layered.user) == [decision(1, day=1)]
    assert len(Store(tmp_path / "first", H200)) == 2


def test_where_the_users_cannot_answer_the_shipped_one_does(tmp_path: Path) -> None:
    Store(tmp_path / "second", H200).add([decision()])
    layered = layers(tmp_path)
    layered.add([at_limit(8, day=9)])
    assert layered.find(problem()) == decision()
    assert layered.find(problem(), Policy(workspace=8)) == at_limit(8, day=9)


def test_layers_are_of_one_environment(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shipped must be stores of nvidia-h200"):
        Layered(Store(tmp_path, H200), [Store(tmp_path, L4)])


def test_discard_leaves_what_was_measured_meanwhile(tmp_path: Path) -> None:
    store, other = Store(tmp_path, H200), Store(tmp_path, H200)
    store.add([decision(1), decision(2)])
    new = decision(1, day=9)
    other.add([new])
    assert store.discard([decision(1), decision(2), decision(3)]) == 1
    assert list(store) == list(Store(tmp_path, H200)) == [new]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda store: store.get("fprop"), TypeError, "problem must be a ConvProblem, got 'fprop'"),
        (lambda store: store.nearest(3), TypeError, "problem must be a ConvProblem, got 3"),
        (lambda store: store.get(problem(), workspace_limit=-1), ValueError, "workspace_limit"),
        (lambda store: store.get(problem(), sampling=""), ValueError, "sampling must be"),
        (lambda store: store.get(problem(), benchmark_limit=-1), ValueError, "benchmark_limit"),
        (lambda store: store.put("fprop", selection()), TypeError, "problem must be"),
        (lambda store: store.put(problem(), None), TypeError, "selection must be a Selection"),
        (lambda s: s.put(problem(), ca.Selection((5,), 1)), TypeError, "must hold Measurement"),
        (lambda s: s.put(problem(), ca.Selection((ca.Measurement("x", 1.0, 1),), 1)), TypeError,
         "Candidate"),
        (lambda s: s.put(problem(), selection(), rejected=5), TypeError, "rejected must be pairs"),
        (lambda s: s.put(problem(), selection(), rejected=["aten"]), TypeError, "rejected must be"),
        (lambda s: s.put(problem(), selection(), rejected=[("aten", "x")]), TypeError, "rejected"),
        (lambda store: store.reject("x"), TypeError, "answer must be a Decision, got 'x'"),
        (lambda store: store.by_key(5), TypeError, "key must be a text, got 5"),
        (lambda store: store.put(problem(), selection(), sampling="a\nb"), ValueError, "sampling"),
        (lambda store: store.add(decision()), TypeError, "decisions must be an iterable"),
        (lambda store: store.add(["fprop"]), TypeError, "decisions must hold nothing but Decision"),
        (lambda store: store.discard([None]), TypeError, "decisions must hold nothing but"),
        (lambda store: Store(5, H200), TypeError, "path must be a path, got 5"),
    ],
)  # fmt: skip
def test_arguments_that_are_none(
    tmp_path: Path, call: Callable[[Any], object], error: type[Exception], said: str
) -> None:
    store = Store(tmp_path, H200)
    with pytest.raises(error, match=said):
        call(store)
    assert len(store) == 0
