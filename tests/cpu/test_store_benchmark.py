"""benchmarks/store.py: a dry run, and writers that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark_scripts import assert_rendered, dry_runs_into, record, run


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record and the plot."""
    folder = tmp_path_factory.mktemp("dry")
    dry_runs_into(folder, {"store": ""}, plotted=["store"], tells="DRY RUN")
    return folder


def test_dry_run(dry_run: Path) -> None:
    data = record(dry_run, "store")
    assert data["complete"] is True
    results = data["results"]
    assert results["failures"] == []
    assert [store["entries"] for store in results["stores"]] == [20, 200]
    for store in results["stores"]:
        for column in ("open_ms", "first_us", "again_us", "miss_us", "put_ms"):
            assert store[column]
            assert min(store[column]) > 0
    assert [(w["processes"], w["lost"]) for w in results["writers"]] == [(1, 0), (2, 0)]
    assert (dry_run / "store.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_is_rendered(dry_run: Path, tmp_path: Path) -> None:
    assert_rendered(dry_run, ["store"], tmp_path)


def test_a_time_limit_is_told(tmp_path: Path) -> None:
    files: list[str | Path] = ["--json", tmp_path / "store.json", "--plot", tmp_path / "store.png"]
    done = run("store", "--device", "cpu", "--time-limit", "0", *files)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    data = record(tmp_path, "store")
    assert data["complete"] is False
    told = "time limit: not run: 20 stores, 200 stores, 1 writers, 2 writers"
    assert data["results"] == {"failures": [told]}
    assert "time limit: not run" in " ".join(done.stdout.split())


def test_a_writer_that_fails_before_it_starts_ends_the_others(
    modules: None, tmp_path: Path
) -> None:
    """Instead of being waited for. A decision without candidates is none."""
    from store_files.measure import writers

    with pytest.raises(RuntimeError, match="2 writers: not all of them started"):
        writers(tmp_path, 2, 1, candidates=0, limit_s=60)


def test_writers_past_their_limit_are_ended(modules: None, tmp_path: Path) -> None:
    from store_files.measure import writers

    with pytest.raises(RuntimeError, match=r"2 writers ended with \[-9, -9\]"):
        writers(tmp_path, 2, 20_000, candidates=1, limit_s=0.2)


def test_bad_options_are_named() -> None:
    for option in ("--entries", "--writers", "--decisions"):
        done = run("store", option, "0")
        assert done.returncode != 0
        assert option in done.stderr
