"""The benchmark of batch norms: a dry run, and its options."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.benchmark_scripts import dry_runs_into, whole_record


@pytest.mark.slow
def test_a_dry_run_leaves_a_whole_record(tmp_path: Path) -> None:
    ways = "eager,ours"
    arguments = (
        f"--shapes 4x6x5x5,4x6x5x5+add --dtype float32 --rounds 3 --block-ms 0.1 --ways {ways}"
    )
    dry_runs_into(tmp_path, {"norms": f"{arguments} --warm-up-s 0"}, "DRY RUN")
    data = whole_record(tmp_path, "norms")
    rows = data["results"]["rows"]
    assert [row["way"] for row in rows] == ways.split(",") * 2
    assert max(row["error"] for row in rows) < 1e-5
    assert all(row["forward (us)"] is not None for row in rows if row["way"] == "ours")
