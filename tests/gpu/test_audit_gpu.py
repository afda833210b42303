"""A whole audit of two small layers, and a recording, on the GPU that is here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cudnn_autotune.audit import record_file
from cudnn_autotune.audit.analysis import left_out, shared_cases
from cudnn_autotune.audit.summary import summarize
from cudnn_autotune.timers.offline.recording import Recording
from cudnn_autotune.timers.telemetry import Gpu
from cudnn_autotune_cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.long]

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


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


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
    record = record_file.load(path)
    assert record.complete
    assert len(record.cases) == 4
    assert not record.failures
    assert left_out(record) == {}
    assert all(
        record.picks["auto"]["1"][case] == first.picks["auto"]["1"][case] for case in first.cases
    )
    result = summarize(record)
    assert set(result) == {"heuristic", "auto", "pytorch_off", "pytorch_on_0"}
    for mode, summary in result.items():
        assert summary.regret is not None, mode
        assert summary.regret.mean < 20, mode
        assert summary.tuning is not None, mode
    assert result["auto"].regret is not None
    assert result["auto"].regret.mean < 2  # other processes may use the GPU
    for case in shared_cases(record):
        oracle = record.oracle[case]
        assert oracle.candidates > 5, case
        pick = record.picks["auto"]["1"][case]
        assert pick.time_ms is not None
    assert plot.stat().st_size > 0


def test_sustained_truth(tmp_path: Path) -> None:
    layers, path = tmp_path / "layers.json", tmp_path / "audit.json"
    layers.write_text(json.dumps(LAYERS))
    run(
        *("audit", "--layers", layers, "--cases", "dense/fprop", "--modes", "race,pytorch_off"),
        *("--sustained", "always", "--json", path),
    )
    record = record_file.load(path)
    (oracle,) = record.oracle.values()
    assert "sustained" in oracle.truths
    (row,) = record.pytorch["pytorch_off"].values()
    assert "sustained" in row.ratios


def test_record_and_replay(tmp_path: Path) -> None:
    out, path = tmp_path / "dense.json.gz", tmp_path / "audit.json"
    shape = ("--input", "16,64,28,28", "--weight", "64,64,3,3", "--padding", "1")
    of = ("--op", "fprop", "--dtype", "float16", "--channels-last")
    run("record", *shape, *of, "--rounds", 6, "--time-limit", 10, out)
    assert out.stat().st_size < 100_000
    run("audit", "--replay", out, "--runs", 2, "--json", path)
    record = record_file.load(path)
    assert record.kind == "replay"
    assert left_out(record) == {}


def test_the_power_at_the_limit_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "vgg.json.gz"
    shape = ("--input", "128,512,28,28", "--weight", "512,512,3,3", "--padding", "1")
    of = ("--op", "dgrad", "--dtype", "float16", "--channels-last")
    run("record", *shape, *of, "--rounds", 3, "--time-limit", 30, out)
    recording = Recording.load(out)
    alone = [r for r in recording.readings if r.phase not in ("start", "rounds")]
    assert alone, "nothing ran alone"
    telemetry = Gpu.of(0)
    tells = bool(telemetry.state().reports_throttling)
    assert {state.reports_throttling for state in alone} == {tells}
    capped = [state for state in alone if "sw_power_cap" in state.throttle_reasons]
    if len(capped) < len(alone) or telemetry.instant_power_w() is None:
        pytest.skip("no power is read: the board is not at its limit, or does not tell")
    for trace in recording.solo:
        powers = [power for power in trace.power_w or () if power is not None]
        assert powers, trace.text
        limit_w = capped[0].power_limit_w
        assert limit_w is not None
        # Less where other tests' kernels take turns with these.
        assert 0.6 * limit_w <= sorted(powers)[len(powers) // 2] <= 1.15 * limit_w
