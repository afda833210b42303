"""benchmarks/store.py: a dry run."""

from __future__ import annotations

from pathlib import Path

from benchmark_scripts import record, run


def test_dry_run(tmp_path: Path) -> None:
    files: list[str | Path] = ["--json", tmp_path / "store.json", "--plot", tmp_path / "store.png"]
    done = run("store", "--device", "cpu", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "DRY RUN" in done.stdout
    data = record(tmp_path, "store")
    assert data["complete"] is True
    assert [store["entries"] for store in data["results"]["stores"]] == [20, 200]
    for store in data["results"]["stores"]:
        for column in ("open_ms", "first_us", "again_us", "miss_us", "put_ms"):
            assert store[column]
            assert min(store[column]) > 0
    assert [(w["processes"], w["lost"]) for w in data["results"]["writers"]] == [(1, 0), (2, 0)]
    assert (tmp_path / "store.png").read_bytes().startswith(b"\x89PNG")


def test_bad_options_are_named() -> None:
    for option in ("--entries", "--writers", "--decisions"):
        done = run("store", option, "0")
        assert done.returncode != 0
        assert option in done.stderr
