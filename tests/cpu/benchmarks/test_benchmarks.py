"""The benchmark scripts: their options, dry runs of some, and how their figures are made."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import not_finite
import pytest
from common import numbers, workers
from ddp_norms import report as ddp_norms_report
from online.overhead import compared
from ranks.report import agree, is_tuned_once, rows, speedup, tables
from support.processes.benchmark_scripts import BENCHMARKS, main, whole_record

from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.kernels.built_in import BUILT_IN

DRY_RUNS = {
    "auto_against_pytorch": "--layers 6",
    "call_overhead": "--dtype float32 --blocks 3 --calls 3 --layouts contiguous",
    "new_sizes": "--sizes 6 --calls 2 --last 3 --ways pytorch_off,online,tune",
    "repeated_tunes": "--runs 2 --models resnet50",
    "warm_start": "--runs 1 --modes heuristic,auto_empty",
}
SCRIPTS = {path.stem: path.name for path in sorted(BENCHMARKS.glob("*.py"))} | {
    path.parent.name: path.parent.name for path in sorted(BENCHMARKS.glob("*/__main__.py"))
}
"""Name of a script, or of a folder that is run as one -> its place in a command."""


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "audit_layers"])
def test_help(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(script, "--help") == 0
    assert f"python benchmarks/{SCRIPTS[script]} " in capsys.readouterr().out


def test_help_of_the_audit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("audit_layers", "--help") == 0
    assert "benchmarks/layers.json" in capsys.readouterr().out


@pytest.mark.parametrize("script", DRY_RUNS)
def test_dry_run_leaves_a_whole_record(dry_runs: Path, script: str) -> None:
    whole_record(dry_runs, script)


@pytest.mark.parametrize("name", not_finite.LAYERS)
def test_kernels_are_offered_for_the_layers_whose_numbers_are_not_finite(name: str) -> None:
    (family,) = (one for one in BUILT_IN if one.name == name)
    for layer in not_finite.LAYERS[name]:
        assert family.offers(not_finite.problem_of(*layer), gpu_of("h200")), layer


# ---- how figures are made -------------------------------------------------------------------


@pytest.mark.parametrize("op", ["wgrad", "batch_norm", "group_norm", "instance_norm"])
def test_random_sizes_of_lone_layers(op: str, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    small = ("--device", "cpu", "--sizes", "4", "--measured", "3")
    assert main("new_sizes", "--op", op, *small, "--json", str(path)) == 0
    rows = json.loads(path.read_text())["results"]["rows"]
    in_both_layouts = op in ("wgrad", "batch_norm")
    assert [row["sizes"] for row in rows] == ([2, 2] if in_both_layouts else [4])
    for row in rows:
        served = row["by a neighbour"] + row["by PyTorch's own path"] + row["searched"]
        assert served == row["sizes"] == row["each size"].count(",") + 1
        assert row["worst"] >= row["geometric mean"] > 0


def test_the_agreement_of_tunes() -> None:
    import repeated_tunes

    same = {"p": "a", "q": "b"}
    assert repeated_tunes.agreement([same, same, same]) == 1.0
    assert repeated_tunes.differing([same, same]) == {}
    other = [same, {"p": "a", "q": "c"}, {"p": "a"}]
    assert repeated_tunes.agreement(other) == pytest.approx(0.5)
    assert repeated_tunes.differing(other) == {"q": ["b", "c", "none"]}
    assert repeated_tunes.agreement([{}, {}]) is None


def test_statistics() -> None:
    assert numbers.geometric_mean([1, 4]) == pytest.approx(2)
    assert numbers.quantile([1, 2, 3, 4], 0.5) == pytest.approx(2.5)
    assert numbers.quantile([5], 0.95) == 5
    low, high = numbers.median_interval([float(n) for n in range(101)])
    assert (low, high) == pytest.approx((40.2, 59.8), abs=0.1)
    assert numbers.significant(1.23456789, 3) == 1.23
    assert numbers.significant(math.nan) is None


@pytest.mark.slow
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


def test_a_step_of_ranks_is_that_of_the_slowest() -> None:
    def rank(*pairs: tuple[float, float]) -> dict[str, Any]:
        plain, ours = map(list, zip(*pairs, strict=True))
        times = {"enable: PyTorch's": plain, "enable: chosen": ours}
        return {"times_ms": times, "served": 5, "soaked": {"enable: chosen": 7}, "skipped": {}}

    ranks = [rank((4.0, 2.0), (4.0, 2.0)), rank((2.0, 3.0), (2.0, 5.0))]
    launch = {"wrapper": "ddp", "bucket_mb": 8, "ranks": ranks}
    arguments = {"model": "any", "batch": 1, "gpus": 2}
    (table,) = ddp_norms_report.tables({"results": {"launches": [launch]}, "arguments": arguments})
    rows = [(row[1], row[2], row[4], row[6]) for row in table.rows]
    assert rows == [
        ("enable: PyTorch's", "4.00", "–", "–"),
        ("enable: chosen", "4.00", "1.000", "7"),
    ]


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
