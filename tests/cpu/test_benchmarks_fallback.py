"""fallback_mode.py: a dry run on simulated GPUs, and what its record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, assert_plotted, run, whole_record

SCRIPT = "fallback_mode"
DRY_RUNS = {SCRIPT: "--cases vgg16_conv3_2,resnet50_conv1 --gpus 2"}


@pytest.fixture(scope="module")
def dry_run(dry_runs: Path) -> dict[str, Any]:
    """The record of two GPUs that share the cases; its plot was drawn."""
    assert_plotted(dry_runs, SCRIPT)
    return whole_record(dry_runs, SCRIPT)


@pytest.mark.search
def test_every_case_is_measured_once(dry_run: dict[str, Any]) -> None:
    from cudnn_autotune.audit.layers import load

    assert dry_run["results"]["failures"] == []
    cases = {c.id for c in load(BENCHMARKS / "layers.json")}
    wanted = sorted(c for c in cases if "vgg16_conv3_2" in c or "resnet50_conv1" in c)
    assert [found["case"] for found in dry_run["results"]["measured"]] == wanted
    for found in dry_run["results"]["measured"]:
        assert found["others"] == 6
        assert {c["engine"] for c in found["configs"]} == {1, 57, 71}


@pytest.mark.search
def test_the_ratios_are_those_of_the_simulated_engines(
    dry_run: dict[str, Any], modules: None
) -> None:
    from fallback_configs.simulated import SimulatedFallback

    from cudnn_autotune.audit.layers import load, select

    order = select(load(BENCHMARKS / "layers.json"), "vgg16_conv3_2,resnet50_conv1")
    seeds = {case.id: seed for seed, case in enumerate(order)}
    near = 0
    for found in dry_run["results"]["measured"]:
        timer, _ = SimulatedFallback(seeds[found["case"]]).open()
        true = {cache: timer.truth("burst", cache) for cache in ("cold", "hot")}
        ms = {text: (true["cold"][text] * true["hot"][text]) ** 0.5 for text in true["hot"]}
        best = min(ms[f"eng{n}"] for n in range(20, 26))
        for config in found["configs"]:
            if "ratio" in config:
                near += 1
                assert config["ratio"] == pytest.approx(ms[config["text"]] / best, rel=0.02)
            elif config["outcome"] == "timed":
                assert config["rough"] > 1.4
            assert (config["build_ms"] >= 300) == (config["engine"] == 71)
    assert near


@pytest.mark.search
def test_what_has_no_tensor_cores_is_not_run_on_a_large_layer(modules: None) -> None:
    from types import SimpleNamespace

    from fallback_configs.measure import MOST_FLOPS, measure
    from fallback_configs.simulated import SimulatedFallback

    from cudnn_autotune.engines.candidates import Work

    outcomes = []
    for flops in (MOST_FLOPS / 2, MOST_FLOPS * 2):
        timer, listed = SimulatedFallback(0).open()
        work = Work(flops, 1e6, "simulated", "float16")
        candidates = SimpleNamespace(of_mode=listed.of_mode, work=work)
        (told,) = (c for c in measure(timer, candidates)["configs"] if not c["tensor_core"])
        outcomes.append((told["outcome"], "build_ms" in told))
    assert outcomes == [("dropped", True), ("not run", False)]


@pytest.mark.search
def test_a_time_limit_is_told(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    done = run(SCRIPT, "--device", "cpu", "--time-limit", "0.01", "--json", path)
    assert done.returncode == 1
    data = json.loads(path.read_text())
    assert data["complete"] is False
    assert data["results"]["failures"] == ["321 of 321 not measured"]


def test_a_record_is_rendered(modules: None, tmp_path: Path) -> None:
    """Also where a layer lists nothing, and nothing of an engine was timed."""
    from fallback_configs import report

    def config(engine: int, outcome: str, **more: Any) -> dict[str, Any]:
        told = {"tensor_core": engine != 1, "compiled": engine == 71}
        return {"text": f"eng{engine}", "engine": engine, "outcome": outcome, **told, **more}

    timed = {"build_ms": 300.0, "rough": 0.8, "ratio": 0.771}
    results = {
        "measured": [
            {
                "case": "a/fprop/float16/nhwc",
                "best": "eng62",
                "configs": [config(71, "timed", **timed), config(1, "not run")],
            },
            {
                "case": "b/fprop/float16/nhwc",
                "best": "eng62",
                "configs": [
                    config(71, "timed", build_ms=310.0, rough=1.3, ratio=1.29),
                    config(57, "timed", build_ms=4.0, rough=7.0),
                    config(1, "dropped", build_ms=2.0),
                ],
            },
            {"case": "c/fprop/float16/nhwc", "best": "eng62", "configs": []},
        ],
        "failures": ["d: lost"],
    }
    data: dict[str, Any] = {"environment": {"device": "cuda"}, "results": results}
    engines, faster = report.tables(data)
    assert list(engines.rows) == [
        (
            "eng71, tensor cores, compiled at run time",
            *("fprop", "2", "2", "0", "0.771", "1.03", "1", "1", "305"),
        ),
        ("eng57, tensor cores", "fprop", "1", "1", "0", "7.000", "7.00", "0", "0", "4"),
        ("eng1, no tensor cores", "fprop", "2", "0", "1", "–", "–", "0", "0", "2"),
    ]
    assert "3 layers" in engines.note
    assert "d: lost" in engines.note
    assert list(faster.rows) == [("a/fprop/float16", "eng71", "-22.9 %", "eng62")]
    report.plot(data, tmp_path / "f.png")
    assert (tmp_path / "f.png").exists()
    assert report.tables({**data, "results": {}}) == []
