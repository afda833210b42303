"""The benchmark of the store has a dry run, and ends if a writer fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_scripts import assert_rendered, dry_runs_into, record, run


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a dry run and returns the folder with its record."""
    folder = tmp_path_factory.mktemp("dry")
    dry_runs_into(folder, {"store": ""}, tells="DRY RUN")
    return folder


def test_dry_run(dry_run: Path) -> None:
    data = record(dry_run, "store")
    assert data["complete"] is True
    results = data["results"]
    assert results["failures"] == []
    assert [store["entries"] for store in results["entries"]] == [20, 200]
    for store in results["entries"]:
        assert 0 < store["bytes"] / store["entries"] < 2000
        for column in ("open_ms", "add_ms", "import_ms"):
            assert store[column]
            assert min(store[column]) > 0
    assert [(w["processes"], w["lost"]) for w in results["writers"]] == [(1, 0), (2, 0)]
    assert [len(w["add_ms"]) for w in results["writers"]] == [5, 10]


def test_a_record_is_rendered(dry_run: Path, tmp_path: Path) -> None:
    assert_rendered(dry_run, ["store"], tmp_path)


def test_a_time_limit_is_told(tmp_path: Path) -> None:
    file = ("--json", tmp_path / "store.json")
    done = run("store", "--device", "cpu", "--time-limit", "0", *file)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    data = record(tmp_path, "store")
    assert data["complete"] is False
    todo = ("20 entries", "200 entries", "1 writers", "2 writers")
    assert data["results"] == {"failures": [f"time limit: not run: {part}" for part in todo]}
    assert "time limit: not run" in " ".join(done.stdout.split())


def test_a_writer_that_fails_ends_the_others(modules: None, tmp_path: Path) -> None:
    """They are not waited for. The writer fails because a decision needs candidates."""
    from store_files.measure import writers

    with pytest.raises(RuntimeError, match="2 writers: one of them failed"):
        writers(tmp_path / "store.json", 2, 1, candidates=0, limit_s=60)


def test_writers_past_their_limit_are_ended(modules: None, tmp_path: Path) -> None:
    from store_files.measure import writers

    with pytest.raises(RuntimeError, match="2 writers: one of them never"):
        writers(tmp_path / "store.json", 2, 20_000, candidates=1, limit_s=0.2)


def test_bad_options_are_named() -> None:
    for option in ("--entries", "--writers", "--decisions"):
        done = run("store", option, "0")
        assert done.returncode != 0
        assert option in done.stderr
