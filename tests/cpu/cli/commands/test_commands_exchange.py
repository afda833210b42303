"""``cudnn-autotune export`` and ``import``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.norms.stored import trained
from support.store.decisions import under
from support.store.stored import (
    H200,
    NEWER_CUDNN,
    decisions,
    fill,
    later,
    misspelt,
    refused,
    succeeded,
)

import cudnn_autotune as ca
from cudnn_autotune.cli.stores import read_whole
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Store

LATER = "2025-12-01T00:00:00Z"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return fill(tmp_path / "store")


def held(place: Path, environment: Environment = H200) -> dict[str, Decision]:
    return {decision.key: decision for decision in Store(place, environment)}


ALL = {decision.key: decision for decision in decisions()}


def test_there_and_back(file: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "new folder" / "shipped.json"
    text = succeeded("export", shipped, "--store", file.parent)
    assert "6 decisions of nvidia-h200" in text
    assert str(shipped) in text
    # It is a store by itself, as an application would give it to set_store(shipped=...).
    assert held(shipped) == ALL
    assert read_whole(shipped).environment == H200
    assert [path.name for path in shipped.parent.iterdir()] == [shipped.name]
    text = succeeded("import", shipped, "--store", tmp_path / "other")
    assert "6 decisions" in text
    assert "6 new, 0 newer, 0 not newer" in text
    assert held(tmp_path / "other") == ALL
    text = succeeded("import", shipped, "--store", tmp_path / "other")
    assert "0 new, 0 newer, 6 not newer" in text


def test_filters(file: Path, tmp_path: Path) -> None:
    succeeded("export", tmp_path / "x.json", "--store", file, "--op", "fprop", "--dtype", "float16")
    wanted = {k for k in ALL if k.startswith("fprop") and "float16" in k}
    assert held(tmp_path / "x.json").keys() == wanted
    assert wanted
    message = refused("export", tmp_path / "y.json", "--store", file, "--engine", "3")
    assert "none of its 6 decisions has engine 3" in message
    message = refused("export", tmp_path / "y.json", "--store", file, "--contains", "absent")
    assert "none of its 6 decisions has text absent" in message
    assert not (tmp_path / "y.json").exists()


def test_what_is_there_is_not_replaced_unasked(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    out.write_text("precious")
    assert "--force replaces it" in refused("export", out, "--store", file)
    assert out.read_text() == "precious"
    succeeded("export", out, "--store", file, "--force")
    assert held(out) == ALL
    assert "it is the store itself" in refused("export", file, "--store", file, "--force")
    assert held(file) == ALL


def test_new_newer_and_older(tmp_path: Path) -> None:
    first, second, third = decisions()[:3]
    mine = fill(tmp_path / "mine.json", [later(first, LATER), second])
    given = fill(tmp_path / "given.json", [first, later(second, LATER), third])
    text = succeeded("import", given, "--store", mine)
    assert "1 new, 1 newer, 1 not newer" in text
    found = held(mine)
    assert found[first.key].provenance.time.startswith("2025-12-01")
    assert found[second.key].provenance.time.startswith("2025-12-01")
    assert found[third.key] == third


def test_looser_constraints_are_not_lost(tmp_path: Path) -> None:
    decision = decisions()[0]
    capped = under(later(decision, LATER), workspace=0)
    mine, given = fill(tmp_path / "a.json", [decision]), fill(tmp_path / "b.json", [capped])
    assert "0 new, 0 newer, 1 not newer" in succeeded("import", given, "--store", mine)
    assert held(mine) == {decision.key: decision}


def test_foreign_decisions_go_into_their_own_file(tmp_path: Path) -> None:
    old = fill(tmp_path / "old.json", decisions()[:2], H200)
    new = fill(tmp_path / "new.json", decisions()[2:], NEWER_CUDNN)
    own = fill(tmp_path / "own.json", decisions()[:1], Environment.of())
    text = succeeded("import", old, new, own, "--store", tmp_path / "store")
    assert text.count("foreign: of another environment than this") == 2
    assert len(held(tmp_path / "store", H200)) == 2
    assert len(held(tmp_path / "store", NEWER_CUDNN)) == 4
    assert len(held(tmp_path / "store", Environment.of())) == 1
    # A single file holds one environment.
    message = refused("import", new, "--store", old)
    assert "'--store'" in message
    assert f"it is of another environment ({H200.file_name})" in message
    assert len(held(old)) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        misspelt,
        lambda data: data.replace(b"wgrad x=", b"fprop x="),
        lambda data: data.replace(b'"version": 2', b'"version": 3'),
        lambda data: data.replace(b"cudnn-autotune store", b"another store"),
        lambda data: b"",
        lambda data: b"\xff\xfe" + data,
        lambda data: b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_written(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    sound = fill(tmp_path / "sound.json", decisions()[:1])
    damaged = fill(tmp_path / "damaged.json")
    data = spoil(damaged.read_bytes())
    assert data != damaged.read_bytes()
    damaged.write_bytes(data)
    message = refused("import", sound, damaged, "--store", tmp_path / "store")
    assert "'FILE...'" in message
    assert "damaged.json" in message
    assert not (tmp_path / "store").exists()
    assert damaged.read_bytes() == data


def below_a_file(place: Path) -> Path:
    place.write_text("in the way")
    return place / "store.json"


def read_only(place: Path) -> Path:
    fill(place, decisions()[:1]).chmod(0o444)
    return place


def no_store(place: Path) -> Path:
    place.write_text("buy milk")
    return place


def stored(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (below_a_file, "File exists"),
        (read_only, "the file is read-only"),
        (no_store, "it is no file of 'cudnn-autotune store'"),
    ],
)
def test_a_store_that_cannot_be_written(
    make: Callable[[Path], Path], why: str, tmp_path: Path
) -> None:
    """One sentence says so, with the reason and the way out. Nothing changes."""
    given = fill(tmp_path / "given.json")
    place = make(tmp_path / "place.json")
    before = stored(tmp_path)
    text = refused("import", given, "--store", place)
    assert f"Error: Invalid value for '--store': {place} cannot be written (" in text
    assert text.endswith(
        f"{why}), and nothing of {given} is taken over; name another place by --store"
    )
    assert "Warning" not in text
    assert stored(tmp_path) == before


def test_a_store_with_all_decisions_need_not_be_written(tmp_path: Path) -> None:
    given = fill(tmp_path / "given.json")
    place = fill(tmp_path / "place.json")
    place.chmod(0o444)
    text = succeeded("import", given, "--store", place)
    assert "0 new, 0 newer, 6 not newer" in text


def norms_in(folder: Path, fastest: str, *sides: int) -> list[list[str]]:
    """Chooses for batch norms with a store; returns what each choice is, and where it is from."""
    ca.set_store(folder, mode="read_write")
    chosen: list[list[str]] = trained(fastest, sides)["chosen"]
    return chosen


def test_choices_for_batch_norms_go_along(tmp_path: Path) -> None:
    fill(tmp_path / "mine", decisions()[:2], Environment.of())
    assert norms_in(tmp_path / "mine", "kept", 5, 6) == [["kept", "tuned"]] * 2
    shipped = tmp_path / "shipped.json"
    text = succeeded("export", shipped, "--store", tmp_path / "mine")
    assert "2 verdicts" in text
    # A choice that is there already stays.
    assert norms_in(tmp_path / "other", "two passes", 6) == [["two passes", "tuned"]]
    text = succeeded("import", shipped, "--store", tmp_path / "other")
    assert "2 verdicts: 1 new" in text
    expected = [["kept", "store"], ["two passes", "store"]]
    assert norms_in(tmp_path / "other", "pytorch", 5, 6) == expected
    ca.set_store(tmp_path / "empty", mode="read", shipped=[shipped])
    assert trained("pytorch", [5])["chosen"] == [["kept", "store"]]


def test_a_part_of_the_decisions_goes_without_batch_norms(tmp_path: Path) -> None:
    fill(tmp_path / "mine", decisions()[:2], Environment.of())
    norms_in(tmp_path / "mine", "kept", 6)
    shipped = tmp_path / "shipped.json"
    given = ("export", shipped, "--store", tmp_path / "mine")
    succeeded(*given)
    assert "--force" in refused(*given)
    succeeded(*given, "--force", "--contains", "x=")
    assert list(tmp_path.glob("shipped*")) == [shipped]


def test_damaged_choices_for_batch_norms_are_refused(tmp_path: Path) -> None:
    fill(tmp_path / "mine", decisions()[:2], Environment.of())
    norms_in(tmp_path / "mine", "kept", 6)
    (file,) = (tmp_path / "mine").glob("*.norms")
    sound = file.read_bytes()
    for data in (sound[:-20], sound.replace(b"kept", b"cept"), b"not a store"):
        file.write_bytes(data)
        assert file.name in refused("export", tmp_path / "x.json", "--store", tmp_path / "mine")
        assert file.name in refused("import", file.with_suffix(".json"), "--store", tmp_path / "x")
        assert not list(tmp_path.glob("x*"))
        assert file.read_bytes() == data


def test_a_folder_is_named_once(tmp_path: Path) -> None:
    said = refused("import", tmp_path, "--store", tmp_path / "x")
    assert said.endswith(f"Invalid value for 'FILE...': {tmp_path}: it is no regular file")
