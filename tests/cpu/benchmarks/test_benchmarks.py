"""The benchmark scripts: their options, dry runs of some, and how their figures are made."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_tests
import kernels
import memory_errors
import pytest
import torch
from benchmark_scripts import BENCHMARKS, main, record, run, whole_record
from common import investigation, junit, numbers, workers
from online_mode.convergence import judged, outcomes
from online_mode.overhead import compared
from online_mode.report import missed_table
from rank_tuning import launch as rank_launch
from rank_tuning.report import agree, is_tuned_once, rows, speedup, tables
from warm_processes.modes import DEFAULT, MODES, plan, warm_up_order
from warm_processes.report import ratio

from cudnn_autotune.audit.layers import load

DRY_RUNS = {
    "auto_against_pytorch": "--layers 6",
    "call_overhead": "--dtype float32 --blocks 3 --calls 3 --layouts contiguous",
    "new_sizes": "--sizes 6 --calls 2 --last 3 --ways pytorch_off,online,tune",
    "warm_start": "--runs 1 --modes heuristic,auto_empty",
}
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "audit_layers"])
def test_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(script, "--help") == 0
    assert f"python benchmarks/{script}.py" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
@pytest.mark.parametrize(
    "script",
    [
        "auto_against_pytorch",
        "kernels",
        "online",
        "ranks",
        "gpu_tests",
        "memory_errors",
        "new_sizes",
    ],
)
def test_what_needs_a_gpu_says_so(script: str) -> None:
    """The default cases are known: they are read before."""
    assert main(script) == f"{script}.py needs a CUDA GPU, and there is none here"


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("kernels", ("--cases", "no_such_layer"), "--cases: no case of kernels.json has"),
        ("kernels", ("--cases", ","), "--cases: must name at least one case"),
        ("kernels", ("--layers", "nowhere.json"), "--layers: "),
        ("kernels", ("--dtypes", "float8"), "--dtypes: ['float8'] unknown"),
        ("call_overhead", ("--settings", "everything"), "--settings"),
        ("auto_against_pytorch", ("--kinds", "2-d"), "--kinds"),
        ("auto_against_pytorch", ("--layers", "0"), "--layers"),
        ("new_sizes", ("--ways", "fastest"), "--ways"),
        ("new_sizes", ("--ways", "online"), "pytorch_off"),
        ("new_sizes", ("--tuned", "heuristic"), "--tuned"),
        ("new_sizes", ("--sizes", "0"), "--sizes"),
        ("online", ("--parts", "nonsense"), "--parts"),
        ("online", ("--cases", "nonsense"), "--cases"),
        ("online", ("--trials", "0"), "--trials"),
        ("warm_start", ("--modes", "fastest"), "--modes"),
        ("warm_start", ("--modes", "auto_empty"), "--modes"),
        ("warm_start", ("--modes", "heuristic,auto_filled"), "auto_empty"),
        ("warm_start", ("--runs", "0"), "--runs"),
        ("ranks", ("--gpus", "1,0"), "--gpus"),
        ("ranks", ("--gpus", "two"), "--gpus"),
        ("ranks", ("--modes", "online"), "--modes"),
        ("ranks", ("--runs", "0"), "--runs"),
        ("ranks", ("--timeout", "0"), "--timeout"),
    ],
)
def test_bad_options_are_named(
    script: str,
    arguments: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(script, *arguments)
    assert status != 0
    assert named in f"{status}{capsys.readouterr().err}"


@pytest.mark.parametrize("script", DRY_RUNS)
def test_a_dry_run_is_not_recorded_under_results(tmp_path: Path, script: str) -> None:
    path = tmp_path / "results" / "cpu" / "record.json"
    assert "dry run" in str(main(script, "--device", "cpu", "--json", path))
    assert not path.exists()


@pytest.mark.parametrize("script", DRY_RUNS)
def test_dry_run_leaves_a_whole_record(dry_runs: Path, script: str) -> None:
    whole_record(dry_runs, script)


def test_memory_errors_are_told_with_what_ran() -> None:
    lines = ["========= COMPUTE-SANITIZER", "case: plain", "candidate: dgrad eng1"]
    lines += ["========= Invalid __global__ write of size 2", "=========     at kernel+0x10"]
    lines += ["case: grouped", "========= ERROR SUMMARY: 1 error"]
    assert list(memory_errors.findings(lines)) == [
        ("plain", ""),
        ("plain: dgrad eng1", "Invalid __global__ write of size 2"),
        ("grouped", ""),
    ]


def test_call_overhead_has_its_settings(dry_runs: Path) -> None:
    results = record(dry_runs, "call_overhead")["results"]
    assert {r["setting"] for r in results["calls"]} == {
        "no_grad",
        "forward",
        "forward_backward",
        "functional",
        "functions",
        "per_sample",
        "checkpoint",
        "norm",
        "norm_act",
    }
    for measured in results["calls"]:
        assert {"pytorch", "pytorch, again", "ours"} <= set(measured["times"])
        assert measured["times"]["ours"]["ratio"] > 0


def test_auto_against_pytorch_has_all_kinds(dry_runs: Path) -> None:
    results = record(dry_runs, "auto_against_pytorch")["results"]
    assert results["failures"] == []
    assert "not measured" not in results
    assert len(results["rows"]) == 6
    assert {row["kind"] for row in results["rows"]} == {"1-d", "3-d", "transposed", "grouped"}
    for row in results["rows"]:
        assert row["least"] <= row["PyTorch over auto"] <= row["most"]
        assert row["times measured"] in (1, 2)
        assert row["first call of auto (ms)"] > 0


def test_new_sizes_have_a_process_of_each_way(dry_runs: Path) -> None:
    results = record(dry_runs, "new_sizes")["results"]
    assert results["failures"] == []
    assert [row["case"] for row in results["rows"]] == ["pytorch_off", "online", "tune"]
    assert results["rows"][0]["over benchmark off"] == 1
    for row in results["rows"]:
        assert row["sizes"] == 6
        assert 1 <= row["compared"] <= 3
        assert row["last sizes over tuned"] > 0
        assert 0 < row["longest of the last half (ms)"] <= row["longest call (ms)"]
        assert row["met again, median (ms)"] > 0
        assert row["host memory (MiB)"] >= row["host memory, ten sizes (MiB)"] >= 0


def test_warm_start_has_a_process_of_each_mode(dry_runs: Path) -> None:
    results = record(dry_runs, "warm_start")["results"]
    assert results["failures"] == []
    assert [process["mode"] for process in results["processes"]] == ["heuristic", "auto_empty"]
    for process in results["processes"]:
        assert 0 < process["forward_ms"] < process["both_ms"]
        assert process["layers"] == 2


# ---- how figures are made -------------------------------------------------------------------


def test_statistics() -> None:
    assert numbers.geometric_mean([1, 4]) == pytest.approx(2)
    assert numbers.quantile([1, 2, 3, 4], 0.5) == pytest.approx(2.5)
    assert numbers.quantile([5], 0.95) == 5
    low, high = numbers.median_interval([float(n) for n in range(101)])
    assert (low, high) == pytest.approx((40.2, 59.8), abs=0.1)
    assert numbers.significant(1.23456789, 3) == 1.23
    assert numbers.significant(math.nan) is None


def test_a_worker_past_its_limit_is_ended_and_its_records_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\n"
        "print(json.dumps(dict(ready=True)), flush=True)\n"
        "told = dict(json.loads(sys.stdin.readline()), given=os.environ['GIVEN'])\n"
        "print(json.dumps(dict(record=told)), flush=True)\n"
        "time.sleep(600)\n"
    )
    worker = workers.start(script, "sleeper", {"GIVEN": "to it alone"})
    failures: list[str] = []
    records = workers.records_of(worker, {"question": 6}, 1.5, failures)
    assert list(records) == [{"question": 6, "given": "to it alone"}]
    assert failures == ["worker sleeper ran past its time limit of 1.5 s"]
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_warm_starts_ratios_are_those_of_medians() -> None:
    def process(mode: str, ms: float) -> dict[str, object]:
        return {"mode": mode, "both_ms": ms}

    processes = [process("heuristic", ms) for ms in (100, 110, 400)]
    processes += [process("auto_filled", ms) for ms in (90, 121, 130)]
    found = {"processes": processes}
    assert ratio(found, "auto_filled", "both_ms") == pytest.approx(1.1)
    assert ratio(found, "pytorch_off", "both_ms") is None


def test_warm_start_fills_stores_before_they_are_used() -> None:
    runs = plan(list(MODES), runs=3)
    assert len(runs) == 3 * len(MODES)
    modes = list(runs.values())
    assert modes.index("auto_empty") < modes.index("auto_filled")
    assert Counter(modes)["auto_empty"] == 3
    # The one that goes first changes.
    assert modes[0] == "heuristic"
    assert [mode for name, mode in runs.items() if name.endswith(":1")][-1] == "heuristic"


def test_warm_start_meets_shapes_with_benchmark_on_first() -> None:
    """The other way round, benchmark would have no effect on shapes that were seen."""
    found = ["pytorch_on_10", "pytorch_off", "auto_filled", "heuristic"]
    assert warm_up_order(list(DEFAULT)) == found


def test_what_ranks_do_not_agree_upon_is_seen() -> None:
    def launch(gpus: int, seconds: float, **last: Any) -> dict[str, Any]:
        rank = {"seconds": seconds, "busy_s": 1.0, "problems": 8, "tuned": 8 // gpus}
        rank |= {"tuned_again": 0, "decisions": "d", "served": "s"}
        return {"mode": "race", "gpus": gpus, "ranks": [rank] * (gpus - 1) + [rank | last]}

    good = launch(2, 2.0)
    assert agree(good)
    assert is_tuned_once(good)
    assert not any(agree(launch(2, 2.0, **{key: "other"})) for key in ("decisions", "served"))
    assert not any(is_tuned_once(launch(2, 2.0, **{k: 5})) for k in ("tuned", "tuned_again"))
    launches = [launch(1, 3.0), good, launch(2, 2.0, tuned_again=1)]
    results = {"launches": launches, "failures": ["time limit: the rest was not run"]}
    assert speedup(rows(results), "race", 2) == pytest.approx(1.5)
    assert speedup({}, "race", 2) is None
    (table,) = tables({"results": results, "arguments": {"model": "any", "batch": 1}})
    assert [row[-2:] for row in table.rows] == [("–", "1 of 1"), ("2 of 2", "1 of 2")]
    assert "time limit: the rest was not run." in table.note


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_launch() -> None:
    with pytest.raises(rank_launch.LaunchError, match=r"KeyError: 'mode'|CUDA|NVIDIA"):
        rank_launch.launch(BENCHMARKS / "ranks.py", 1, {}, 300)


def test_onlines_differences_are_paired_block_by_block() -> None:
    found = compared(
        [
            {
                "quiet_us": [10.0, 10.0, 12.0],
                "tuner_cpu_us": 300.0,
                "turns": 75,
                "preparing": {"heuristic": [], "online": []},
                "undecided": {"heuristic": [10.0, 20.0, 30.0], "online": [12.0, 23.0, 32.0]},
            }
        ]
    )
    assert "preparing" not in found
    assert found["undecided"]["difference_us"]["median"] == 2.0
    assert found["undecided"]["difference_to_quiet_us"]["median"] == 13.0
    assert found["undecided"]["difference_us"]["mean"] == pytest.approx(7 / 3, rel=1e-4)
    assert found["tuner_cpu_us_a_turn"] == 4.0


def test_onlines_regret_is_against_the_best_of_all() -> None:
    found = judged("a", "b", {"a": 1.02, "b": 1.01, "c": 1.0})
    assert found["best"] == "c"
    assert found["regret"] == pytest.approx(0.02)
    assert found["race_regret"] == pytest.approx(0.01)
    assert found["against_race"] == pytest.approx(1.02 / 1.01 - 1, rel=1e-3)


def test_what_became_of_the_fastest_is_told() -> None:
    one, other = (SimpleNamespace(text=text) for text in ("eng1", "eng2"))
    ranking = [
        SimpleNamespace(candidate=one, samples=30, eliminated=""),
        SimpleNamespace(candidate=other, samples=2, eliminated="1.52 times the best"),
    ]
    found = outcomes(SimpleNamespace(selection=SimpleNamespace(ranking=ranking)))
    assert found == {
        "eng1": "not eliminated; 30 samples",
        "eng2": "1.52 times the best; 2 samples",
    }
    missed = judged("eng1", "eng1", {"eng1": 1.1, "eng2": 1.0, "eng3": 1.2})
    unknown = judged("eng1", "eng1", {"eng1": 1.1, "eng3": 1.0})
    right = judged("eng1", "eng1", {"eng1": 1.0, "eng2": 1.1})
    entries = [
        {"case": "missed", "outcomes": found, **missed},
        {"case": "unknown", "outcomes": found, **unknown},
        {"case": "right", "outcomes": found, **right},
        {"case": "older", **missed},
        {"case": "failed", "error": "CudnnError: no"},
    ]
    assert missed_table({"results": {"convergence": entries}}).rows == [
        ("missed", "eng2", "1.52 times the best; 2 samples"),
        ("unknown", "eng3", "it did not take part"),
    ]


def test_kernels_are_summed_up_by_kind() -> None:
    """A layer on which an implementation loses or has no offer counts as 1: the other one runs."""
    rows = [
        {"case": "a", "kind": "grouped", "op": "fprop", "times as fast": 4.0},
        {"case": "b", "kind": "grouped", "op": "fprop", "times as fast": 0.5},
        {"case": "c", "kind": "grouped", "op": "fprop", "times as fast": None},
        {"case": "d", "kind": "grouped", "op": "dgrad", "times as fast": 2.0},
    ]
    found = {"title": "Each layer", "rows": rows, "failures": []}
    summary, layers = kernels.tables({"results": found, "environment": {"device": "cuda"}})
    assert summary.rows == [
        ["grouped", "dgrad", "1", "2.000", "2.000", "2.000", "1"],
        ["grouped", "fprop", "3", "1.587", "1.000", "4.000", "1"],
    ]
    assert len(layers.rows) == 4


def test_every_layer_of_kernels_has_a_kind() -> None:
    kinds = Counter(kernels.kind_of(case.problem()) for case in load(kernels.LAYERS))
    assert set(kinds) == {
        "depthwise, 7 and wider",
        "depthwise, narrower",
        "depthwise, strided",
        "grouped",
        "grouped, long filters",
        "first layer",
        "odd channels",
        "1x1, strided",
    }


def test_an_investigations_rows_become_a_table() -> None:
    rows = [{"case": "a/fprop", "engine": "eng1", "time (ms)": 0.123456, "over": None}]
    results = {"title": "Blocks", "rows": rows, "failures": ["b/fprop: RuntimeError: lost"]}
    text = investigation.tables({"results": results})[0].markdown()
    assert "| a/fprop | eng1 | 0.1235 | – |" in text
    assert re.search(r"^b/fprop: RuntimeError: lost\.$", text, re.MULTILINE)


def test_architectures(tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    cases = "timm:lcnet_050,timm:mixnet_s"
    file = tmp_path / "architectures.json"
    given = ("--device", "cpu", "--size", "32", "--ways", "convert,enable", "--json", file)
    done = run("architectures", *given, "--cases", cases)
    assert done.returncode == 0, done.stderr
    results = whole_record(tmp_path, "architectures")["results"]
    assert [(row["case"], row["state"]) for row in results["rows"]] == [
        (case, state) for case in cases.split(",") for state in ("eval", "train")
    ]
    assert all(row["served"] > 20 for row in results["rows"])
    assert {row["convert"] for row in results["rows"]} == {0.0}, "on a CPU it is PyTorch's"
    done = run("architectures", *given, "--cases", cases, "--tolerance", "-1")
    assert done.returncode == 1
    failures = record(tmp_path, "architectures")["results"]["failures"]
    assert len(failures) == 8
    assert failures[0] == "timm:lcnet_050 (eval, convert): ValueError: outputs differ by 0"


def test_what_failed_on_a_gpu_is_told(tmp_path: Path) -> None:
    tests = "import pytest\n\ndef test_fails():\n    assert 1 == 2\n\ndef test_passes(): pass\n\n"
    tests += "@pytest.mark.skip(reason='why')\ndef test_is_skipped(): pass\n"
    (tmp_path / "test_some.py").write_text(tests)
    options = SimpleNamespace(log=tmp_path / "log", workers=2)
    code, found = junit.run([str(tmp_path)], options)  # type: ignore[arg-type]
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "test_fails" in (tmp_path / "log").read_text()
    results = gpu_tests.summed(found)
    (counts,) = results["files"].values()
    assert [counts[outcome] for outcome in gpu_tests.OUTCOMES] == [1, 1, 0, 1]
    assert results["failures"] == [("test_some::test_fails", "assert 1 == 2")]
    assert results["skip_reasons"] == ["1 x why"]
    assert [table.title for table in gpu_tests.tables({"results": results})][1:] == ["Failures"]
