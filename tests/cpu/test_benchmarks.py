"""The benchmark scripts: a dry run of each on the CPU, and the rules of records and results."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import (
    assert_help,
    assert_plotted,
    dry_runs_into,
    publish,
    record,
    run,
    whole_record,
)

SCRIPTS = (
    "audit_layers",
    "forum_repro",
    "call_overhead",
    "kernel_cfgs",
    "fallback_mode",
    "make_layers",
    "render_results",
    "store",
)
DRY_RUNS = {
    "forum_repro": "--iterations 5 --direction all --modes till_stable",
    "call_overhead": "--dtype float32 --blocks 3 --calls 3 --layouts contiguous --table-size 20 "
    "--memory-shapes 4 --memory-step 2",
}


@pytest.fixture(scope="module")
def dry_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the record of a dry run of each script, and the plot of one: rendering
    draws them all."""
    folder = tmp_path_factory.mktemp("dry")
    dry_runs_into(folder, DRY_RUNS, plotted=["forum_repro"])
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    assert_help(script)


@pytest.mark.parametrize("script", DRY_RUNS)
def test_dry_run_leaves_a_whole_record(dry_runs: Path, script: str) -> None:
    data = whole_record(dry_runs, script)
    environment = data["environment"]
    assert environment["gpu"] is None
    for key in ("torch", "python", "package", "date", "command"):
        assert environment[key], key


def test_plot(dry_runs: Path) -> None:
    assert_plotted(dry_runs, "forum_repro")


def test_forum_repro_times_every_iteration(dry_runs: Path) -> None:
    processes = record(dry_runs, "forum_repro")["results"]["processes"]
    assert [p["mode"] for p in processes] == ["till_stable"]
    for process in processes:
        assert set(process["directions"]) == {"fprop", "dgrad", "wgrad"}
        for direction in process["directions"].values():
            starts, durations = direction["start_ms"], direction["duration_ms"]
            assert len(durations) == 5
            assert all(d > 0 for d in durations)
            assert starts == sorted(starts)


def test_call_overhead_has_its_three_parts(dry_runs: Path) -> None:
    results = record(dry_runs, "call_overhead")["results"]
    assert {r["setting"] for r in results["calls"]} == {
        "no_grad",
        "forward",
        "forward_backward",
        "functional",
    }
    for measured in results["calls"]:
        assert {"pytorch", "pytorch, again", "ours"} <= set(measured["times"])
        assert measured["times"]["ours"]["ratio"] > 0
    assert [step["filled"] for step in results["table"]] == [1, 16, 20]
    for implementation in ("ours", "pytorch"):
        grown = results["memory"][implementation]
        assert [r["shapes"] for r in grown] == [1, 3, 5]
        assert all(r["resident_kb"]["VmRSS"] > 0 for r in grown)


def test_call_overhead_that_stops_at_its_limit_is_not_complete(tmp_path: Path) -> None:
    """Its worker ends by itself, with what it has until then."""
    sizes = "--blocks 1 --calls 1 --parts table --table-size 60000 --time-limit 11"
    path = tmp_path / "call_overhead.json"
    done = run("call_overhead", "--device", "cpu", *sizes.split(), "--json", path)
    assert done.returncode == 1, done.stderr
    data = record(tmp_path, "call_overhead")
    assert data["complete"] is False
    assert "failures" not in data["results"]
    steps = data["results"]["table"]
    assert [step.get("stopped") for step in steps] == [None] * (len(steps) - 1) + ["time limit"]
    assert steps[-1]["filled"] < 60000


def test_a_dry_run_is_not_recorded_under_results(tmp_path: Path) -> None:
    path = tmp_path / "results" / "cpu" / "forum_repro.json"
    done = run("forum_repro", "--device", "cpu", "--json", path)
    assert done.returncode != 0
    assert "dry run" in done.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("forum_repro", ("--modes", "fastest"), "--modes"),
        ("forum_repro", ("--shape", "64x3x224"), "--shape"),
        ("forum_repro", ("--groups", "2"), "--groups"),
        ("audit_layers", ("--share", "3/2"), "--share"),
        ("audit_layers", ("--modes", "fastest"), "--modes"),
        ("kernel_cfgs", ("--layers", "no_such_layer"), "--layers"),
        ("kernel_cfgs", ("--ops", "fprop,bprop"), "--ops"),
        ("kernel_cfgs", ("--rounds", "6"), "--rounds"),
        ("kernel_cfgs", ("--values", "0"), "--values"),
        ("kernel_cfgs", ("--time-limit", "0"), "--time-limit"),
        ("fallback_mode", ("--cases", "no_such_layer"), "--cases"),
        ("fallback_mode", ("--rounds", "6"), "--rounds"),
        ("fallback_mode", ("--gpus", "0"), "--gpus"),
        ("fallback_mode", ("--time-limit", "0"), "--time-limit"),
        ("call_overhead", ("--parts", "everything"), "--parts"),
    ],
)
def test_bad_options_are_named(script: str, arguments: tuple[str, ...], named: str) -> None:
    done = run(script, *arguments)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


# ---- what is published ----------------------------------------------------------------------


@pytest.fixture
def published(dry_runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    """(results folder, folder of pages) of records that claim a GPU."""
    results = tmp_path / "results"
    publish(dry_runs, DRY_RUNS, results)
    return results, tmp_path / "pages"


def render(results: Path, pages: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run("render_results", "--results", results, "--pages", pages, *more)


def test_rendering_writes_a_page_and_check_sees_what_changed(
    published: tuple[Path, Path],
) -> None:
    results, pages = published
    page = pages / "gpu.md"
    assert render(results, pages, "--check").returncode == 1
    assert not pages.exists(), "--check writes nothing"
    done = render(results, pages)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("# Measured on: Test GPU\n")
    for script in DRY_RUNS:
        assert f"[Record](../results/gpu/{script}.json)" in text
        assert (results / "gpu" / f"{script}.png").exists()
    assert render(results, pages, "--check").returncode == 0
    page.write_text(text.replace("Test GPU", "Another GPU"))
    assert render(results, pages, "--check").returncode == 1
    page.write_text(text)
    (results / "gpu" / "forum_repro.png").unlink()
    assert render(results, pages, "--check").returncode == 1


def test_check_names_a_page_without_records(published: tuple[Path, Path]) -> None:
    results, pages = published
    assert render(results, pages).returncode == 0
    (pages / "other.md").write_text("# Measured on another GPU\n")
    done = render(results, pages, "--check")
    assert done.returncode == 1
    assert "other.md has no records" in done.stderr


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "cpu"}, "dry run"),
        ({"driver": None}, "driver"),
        ({"commit": ""}, "commit"),
        ({"cudnn_frontend": None}, "cudnn_frontend"),
    ],
)
def test_figures_without_their_origin_are_left_out(
    published: tuple[Path, Path], change: dict[str, Any], named: str
) -> None:
    """They are named; the others are rendered."""
    results, pages = published
    path = results / "gpu" / "call_overhead.json"
    data = json.loads(path.read_text())
    data["environment"].update(change)
    path.write_text(json.dumps(data))
    done = render(results, pages)
    assert done.returncode == 1
    assert "call_overhead.json" in done.stderr
    assert named in done.stderr
    text = (pages / "gpu.md").read_text()
    assert "results/gpu/forum_repro.json" in text
    assert (results / "gpu" / "forum_repro.png").exists()
    assert "call_overhead" not in text
    assert render(results, pages, "--check").returncode == 1
    path.unlink()
    assert render(results, pages, "--check").returncode == 0


def test_the_results_pages_say_what_the_records_say() -> None:
    done = run("render_results", "--check")
    assert done.returncode == 0, done.stderr


# ---- parts ----------------------------------------------------------------------------------


def test_statistics(modules: None) -> None:
    from common import numbers

    assert numbers.geometric_mean([1, 4]) == pytest.approx(2)
    assert numbers.quantile([1, 2, 3, 4], 0.5) == pytest.approx(2.5)
    assert numbers.quantile([5], 0.95) == 5
    low, high = numbers.bootstrap_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert 1 <= low <= 3 <= high <= 100
    assert numbers.significant(1.23456789, 3) == 1.23
    assert numbers.significant(math.nan) is None


def test_a_worker_past_its_limit_is_ended_and_its_records_are_kept(
    modules: None, tmp_path: Path
) -> None:
    from common import workers

    script = tmp_path / "worker.py"
    script.write_text(
        "import json, sys, time\n"
        f"print({workers.PREFIX!r} + json.dumps(dict(ready=True)))\n"
        "request = json.loads(sys.stdin.readline())\n"
        "print('a library says hello')\n"
        f"print({workers.PREFIX!r} + json.dumps(dict(record=request)))\n"
        "time.sleep(600)\n"
    )
    worker = workers.Worker(script, "sleeper")
    records = worker.run({"question": 6}, time_limit_s=1.5)
    assert next(records) == {"question": 6}
    with pytest.raises(workers.WorkerError, match="sleeper ran past its time limit"):
        next(records)
    assert worker.process.poll() is not None


def test_gpu_named_by_cuda_visible_devices(modules: None) -> None:
    from common import telemetry

    assert telemetry.visible_index(None) == 0
    assert telemetry.visible_index("2,3") == 2
    assert telemetry.visible_index("GPU-12ab,GPU-34cd") == "GPU-12ab"
    assert telemetry.reason_names(0x1 | 0x4) == ["gpu_idle", "sw_power_cap"]
