"""audit_layers.py: a dry run of the script, and what of an audit's record is published."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS
from subprocesses import python

from cudnn_autotune.audit import layers, record_file
from cudnn_autotune.audit.config import AuditConfig
from cudnn_autotune.audit.model import Record
from cudnn_autotune.audit.schedule import Session
from cudnn_autotune.core.json_dataclass import encode

SCRIPT = str(BENCHMARKS / "audit_layers.py")
RANGE = {"least": 1.0, "median": 2.0, "most": 3.0}


def test_dry_run_says_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    done = python(
        *(
            SCRIPT,
            "--replay",
            "h200_forum",
            "--modes",
            "heuristic,sample_once",
            "--json",
            str(path),
        ),
        env={"GIT_COMMIT": "abc123", "GIT_DIRTY": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "sample_once" in done.stdout
    told = record_file.load(path)
    assert told.complete
    assert list(told.picks) == ["heuristic", "sample_once"]
    environment = told.environment
    assert (environment["commit"], environment["dirty"]) == ("abc123", False)
    assert environment["device"] == "cpu"
    # The command without the machine's folders.
    wanted = "benchmarks/audit_layers.py --replay h200_forum --modes heuristic,sample_once"
    assert environment["command"] == f"{wanted} --json audit.json"


def test_a_dry_run_is_not_recorded_under_results(tmp_path: Path) -> None:
    path = tmp_path / "results" / "audit.json"
    done = python(SCRIPT, "--replay", "h200_forum", "--json", str(path))
    assert done.returncode == 2
    assert "dry run" in done.stderr
    assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for an hour")
def test_without_arguments_it_wants_a_gpu() -> None:
    """All the way to the GPU: the default modes and the list of layers are accepted."""
    done = python(SCRIPT)
    assert done.returncode == 2
    assert "no CUDA GPU here" in done.stderr


# ---- what is published ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Record:
    """An audit in real processes on simulated GPUs, which then claims to be of real layers on a
    real GPU; it never leaves these tests."""
    presets = ("quiet", "small-kernels", "depthwise")
    cases = layers.select(layers.load(BENCHMARKS / "layers.json"))[: len(presets)]
    described = {
        case.id: {"simulation": preset} for case, preset in zip(cases, presets, strict=True)
    }
    record = Record("gpu", {"reference": "race"}, {}, described)
    plan = AuditConfig(
        {"race": 1, "heuristic": 1}, ["pytorch_off"], "race", backend="simulation.audit"
    )
    Session(plan, record, list(described)).run()
    assert record.complete, record.failures
    record.cases = {case.id: encode(case) for case in cases}
    record.telemetry = {
        "readings": 2,
        "period_s": 0.1,
        "unavailable": None,
        "clock_mhz": RANGE,
        "power_w": None,
        "temperature_c": RANGE,
        "throttle_reasons": {"sw_power_cap": 0.25},
    }
    record.environment = dict.fromkeys(("gpu", "driver", "cuda", "torch", "python"), "1.0")
    record.environment |= {"gpu": "Test GPU", "cudnn": "9.19.0", "cudnn_frontend": "1.28.0"}
    record.environment |= {"package": "0.1", "date": "2026-01-01", "command": "audit_layers.py"}
    record.environment |= {"commit": "0" * 40, "dirty": False, "device": "cuda"}
    record.environment |= {"max_sm_clock_mhz": 1980.0, "power_limit_w": 700.0}
    return record


def render(record: Record, folder: Path, **environment: Any) -> subprocess.CompletedProcess[str]:
    tree = record_file.to_json(record)
    tree["environment"] |= environment
    path = folder / "results" / "gpu" / "audit_layers.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(tree))
    script = str(BENCHMARKS / "render_results.py")
    return python(script, "--results", str(path.parents[1]), "--pages", str(folder / "pages"))


def test_an_audit_is_rendered(measured: Record, tmp_path: Path) -> None:
    done = render(measured, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results/gpu/audit_layers.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "pages" / "gpu.md").read_text()
    assert text.startswith("# Measured on: Test GPU\n")
    assert "cuDNN 9.19.0" in text
    assert "SM clock 1 to 3 MHz (highest 1980)" in text
    assert "sw_power_cap 25 %" in text
    assert "3 of 3 cases; networks: " in text
    for mode in ("race", "heuristic", "pytorch_off"):
        assert f"| {mode} | 1 |" in text


def test_its_tables_say_what_the_summary_says(measured: Record, modules: None) -> None:
    from audited import report

    from cudnn_autotune.audit.summary import summarize

    told = summarize(measured)
    by_title = {
        table.title: table for table in report.tables({"audit": measured, "earlier_sessions": []})
    }
    picked, by_truth, against, by_kind = by_title.values()
    cells = {row[0]: dict(zip(picked.columns[2:], row[2:], strict=True)) for row in picked.rows}
    for mode, summary in told.items():
        assert summary.regret is not None
        assert cells[mode]["worst"] == f"{summary.regret.worst:.3f}"
        assert cells[mode]["within 1 %"] == f"{100 * summary.regret.within_1_percent:.1f} %"
    columns = dict(zip(by_truth.columns, zip(*by_truth.rows, strict=True), strict=True))
    assert set(columns) == {"mode", "burst cold (3 cases)", "burst hot (3 cases)"}
    ratios = {
        case: row.ratios["burst hot"].median
        for case, row in measured.pytorch["pytorch_off"].items()
    }
    (hot,) = (row for row in against.rows if row[1] == "burst hot")
    assert hot[4] == f"{min(ratios.values()):.3f}"
    assert hot[-1] == min(ratios, key=ratios.__getitem__)
    # The cases of all directions and dtypes are those of the first table.
    assert sum(int(row[1]) for row in by_kind.rows) == 3


def test_what_was_not_compared_is_told(measured: Record, modules: None) -> None:
    from audited import report

    record = copy.deepcopy(measured)
    case = next(iter(record.cases))
    record.picks["race"]["1"][case] = type(record.picks["race"]["1"][case])(error="no luck")
    session = {"environment": {**record.environment, "commit": "f" * 40}, "telemetry": None}
    note = report.tables({"audit": record, "earlier_sessions": [session]})[0].note
    assert "2 of 3 cases" in note
    assert "Not compared: 1 cases: race#1: no luck (1)." in note
    assert "Continues 1 sessions of commit ffffffffff." in note


@pytest.mark.parametrize(
    ("change", "named"),
    [({"commit": ""}, "commit"), ({"device": "cpu"}, "dry run"), ({"driver": None}, "driver")],
)
def test_an_audit_without_its_origin_is_refused(
    measured: Record, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    done = render(measured, tmp_path, **change)
    assert done.returncode == 1
    assert "audit_layers.json" in done.stderr
    assert named in done.stderr


def test_a_simulation_is_refused(measured: Record, tmp_path: Path) -> None:
    """Whatever its environment claims."""
    done = render(dataclasses.replace(measured, kind="simulate"), tmp_path)
    assert done.returncode == 1
    assert "dry run" in done.stderr


def test_a_session_without_its_origin_is_refused(measured: Record, tmp_path: Path) -> None:
    session = {
        "environment": {**measured.environment, "commit": None},
        "telemetry": measured.telemetry,
    }
    done = render(dataclasses.replace(measured, sessions=[session]), tmp_path)
    assert done.returncode == 1
    assert "commit" in done.stderr
