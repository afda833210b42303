"""``cudnn-autotune prune``."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
from support.store.decisions import under
from support.store.stored import H200, decisions, fill, later, refused, run, succeeded

from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Store


def keys(place: Path, environment: Environment = H200) -> set[str]:
    return set(Store(place, environment).keys())


def days_ago(days: float) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of an H200, the first three decisions a year old; and of this machine."""
    old = [later(d, days_ago(365)) for d in decisions()[:3]]
    new = [later(d, days_ago(1.5)) for d in decisions()[3:]]
    fill(tmp_path, old + new)
    fill(tmp_path, old[:1] + new[:1], Environment.of())
    return tmp_path


def test_by_age(folder: Path) -> None:
    text = succeeded("prune", "--store", folder, "--older-than", "30d", "--yes")
    assert "3 of 6 decisions" in text
    assert "1 of 2 decisions" in text
    assert "removed 4 decisions" in text
    assert keys(folder) == {d.key for d in decisions()[3:]}
    assert keys(folder, Environment.of()) == {decisions()[3].key}
    assert "nothing to remove" in succeeded("prune", "--store", folder, "--older-than", "2d")
    assert "removed 4 decisions" in succeeded(
        "prune", "--store", folder, "--older-than", "36h", "--yes"
    )


def test_other_environments(folder: Path) -> None:
    succeeded("prune", "--store", folder, "--environment", "other-than-this", "--yes")
    # Nothing is left of it, not even an empty file.
    assert [path.name for path in folder.glob("*.json")] == [Environment.of().file_name]
    assert len(keys(folder, Environment.of())) == 2
    succeeded("prune", "--store", folder, "--environment", "this", "--yes")
    assert list(folder.glob("*.json")) == []
    assert "nothing is stored there yet" in succeeded(
        "prune", "--store", folder, "--environment", "any"
    )


def test_it_asks(folder: Path) -> None:
    given = ("prune", "--store", folder, "--op", "dgrad")
    done = run(*given, input="n\n")
    assert done.exit_code == 1
    assert "Remove 3 decisions? [y/N]" in done.output
    assert len(keys(folder)) == 6
    assert run(*given, input="").exit_code == 1  # nobody there to say yes
    assert len(keys(folder)) == 6
    assert run(*given, input="y\n").exit_code == 0
    assert len(keys(folder)) == 4


def test_what_is_measured_while_it_asks_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = later(decisions()[0], days_ago(0))

    def answer(*_: object, **__: object) -> None:
        Store(folder, H200).add([new])

    monkeypatch.setattr(click, "confirm", answer)
    text = succeeded("prune", "--store", folder / H200.file_name, "--older-than", "30d")
    assert "removed 2 decisions" in text
    assert "1 decision changed meanwhile, and stayed" in text
    assert new in list(Store(folder, H200))
    assert len(keys(folder)) == 4


def test_with_and_without_determinism_are_two(folder: Path) -> None:
    plain = under(decisions()[0], workspace=1 << 20)
    strict = replace(
        under(later(plain, days_ago(1)), workspace=None),
        problem=replace(plain.problem, deterministic=True),
    )
    file = fill(folder / "both.json", [later(plain, days_ago(365)), strict])
    succeeded("prune", "--store", file, "--older-than", "30d", "--yes")
    assert list(Store(file, H200)) == [strict]


def test_dry_run(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    text = succeeded("prune", "--store", folder, "--op", "dgrad", "--dry-run")
    assert "would remove 3 decisions" in text
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    """One sentence says so, with the reason."""
    place = fill(tmp_path / "place.json")
    place.chmod(0o444)
    text = refused("prune", "--store", place, "--environment", "any", "--yes")
    assert text.endswith(f"'--store': {place} cannot be written (the file is read-only)")
    assert "Warning" not in text
    assert len(keys(place)) == 6


def test_what_is_no_store_is_left_alone(folder: Path) -> None:
    (folder / "notes.json").write_text("{}")
    done = run("prune", "--store", folder, "--environment", "any", "--yes")
    assert "left alone" in done.stderr
    assert [path.name for path in folder.glob("*.json")] == ["notes.json"]
