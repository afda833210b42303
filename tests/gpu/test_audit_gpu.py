"""A whole audit of two small layers, and a recording, on the GPU that is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.tuning.recorder import record, save

from cudnn_autotune import ConvProblem
from cudnn_autotune.audit import record_file
from cudnn_autotune.audit.offline.recording import Recording
from cudnn_autotune.audit.summary import left_out, shared_cases, summarize
from cudnn_autotune.expert import open_timer
from cudnn_autotune_cli import main

pytestmark = pytest.mark.long

LAYERS = {
    "layers": [
        {
            "name": "dense",
            "input_shape": [16, 64, 28, 28],
            "weight_shape": [64, 64, 3, 3],
            "padding": 1,
        },
        {
            "name": "depthwise",
            "input_shape": [16, 64, 28, 28],
            "weight_shape": [64, 1, 3, 3],
            "padding": 1,
            "groups": 64,
            "ops": ["fprop"],
        },
    ]
}


HALF: dict[str, Any] = {"dtype": torch.float16, "memory_format": torch.channels_last}


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def recorded(problem: ConvProblem, **options: Any) -> Recording:
    timer, candidates = open_timer(problem)
    return record(timer, candidates, problem, **options)


def test_audit_and_its_continuation(tmp_path: Path) -> None:
    layers, path = tmp_path / "layers.json", tmp_path / "audit.json"
    layers.write_text(json.dumps(LAYERS))
    plot = tmp_path / "audit.png"
    common = ("audit", "--layers", layers, "--json", path)
    modes = ("--modes", "heuristic,auto,pytorch_off,pytorch_on_0", "--runs", "1,auto=2")
    run(*common, *modes, "--share", "1/2")
    first = record_file.load(path)
    assert first.complete
    assert len(first.cases) == 2
    run(*common, *modes, "--plot", plot)
    found = record_file.load(path)
    assert found.complete
    assert len(found.cases) == 4
    assert not found.failures
    assert left_out(found) == {}
    assert all(
        found.picks["auto"]["1"][case] == first.picks["auto"]["1"][case] for case in first.cases
    )
    result = summarize(found)
    assert set(result) == {"heuristic", "auto", "pytorch_off", "pytorch_on_0"}
    for mode, summary in result.items():
        assert summary.regret is not None, mode
        assert summary.regret.mean < 20, mode
        assert summary.tuning is not None, mode
    assert result["auto"].regret.mean < 2  # other processes may use the GPU
    for case in shared_cases(found):
        oracle = found.oracle[case]
        assert oracle.candidates > 5, case
        pick = found.picks["auto"]["1"][case]
        assert pick.time_ms is not None
    assert plot.stat().st_size > 0


def test_record_and_replay(tmp_path: Path) -> None:
    out, path = tmp_path / "dense.json.gz", tmp_path / "audit.json"
    problem = ConvProblem("fprop", (16, 64, 28, 28), (64, 64, 3, 3), padding=1, **HALF)
    save(recorded(problem, rounds=6, time_limit_ms=10e3), out)
    assert out.stat().st_size < 100_000
    run("audit", "--replay", out, "--runs", 2, "--json", path)
    found = record_file.load(path)
    assert found.kind == "replay"
    assert left_out(found) == {}
