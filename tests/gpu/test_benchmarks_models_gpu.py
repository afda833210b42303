"""models.py on a GPU: steps are replayed, their memory is measured, and their results are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.benchmark_scripts import record, run

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("step", "ways"), [("infer", ["eager", "convert", "backend"]), ("train", ["eager", "convert"])]
)
def test_every_way_is_replayed_and_right(tmp_path: Path, step: str, ways: list[str]) -> None:
    """Of graphs that share their memory, with the lock of the GPU lent while one compiles."""
    options = f"--models unet3d --steps {step} --batches 1 --ways {','.join(ways)}"
    options += " --pytorch pytorch_off --sampling heuristic --rounds 2 --block-ms 5 --settle-s 0"
    path = tmp_path / "models.json"
    done = run("models", *options.split(), "--time-limit", "280", "--json", path)
    assert done.returncode == 0, done.stderr
    data = record(tmp_path, "models")
    assert data["complete"] is True
    (measured,) = data["results"]["runs"]
    assert list(measured["times_ms"]) == ways
    assert measured["by_calls"] == []
    for way in ways:
        assert 1e8 < measured["peak_bytes"][way] < 5e10
        errors = measured["ways"][way]["errors"]
        assert errors["outputs"] < 0.05
        assert errors.get("beyond", []) == []
    assert measured["ways"]["convert"]["choices"]["made"] > 10
