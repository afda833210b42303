"""kernel_cfgs.py: a dry run on a simulated GPU, and how a portfolio is chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import assert_plotted, run, whole_record

SCRIPT = "kernel_cfgs"
LAYERS = ("resnet50_layer3_3x3", "vgg16_conv3_2")
DRY_RUNS = {SCRIPT: "--layers " + ",".join(LAYERS)}


@pytest.fixture(scope="module")
def dry_run(dry_runs: Path) -> dict[str, Any]:
    """The record; its plot was drawn."""
    assert_plotted(dry_runs, SCRIPT)
    return whole_record(dry_runs, SCRIPT)


@pytest.mark.search
def test_every_engine_is_measured_on_every_layer(dry_run: dict[str, Any]) -> None:
    measured = dry_run["results"]["measured"]
    assert [(e["layer"], e["op"], e["engine"]) for e in measured] == [
        (layer, op, engine)
        for layer in LAYERS
        for op, engine in (("dgrad", 78), ("wgrad", 70), ("fprop", 71))
    ]
    for entry in measured:
        # What it lists and 56 values, of which the simulated engine has 40.
        assert (entry["tried"], entry["built"]) == (57, 41)
        assert len(entry["rough"]) == 41
        raced = {"listed", *(str(value) for value in entry["shipped"] if value < 40)}
        assert raced <= set(entry["kernels"])
        assert len(entry["rivals"]) == 4
        assert entry["build_s"] > 0.3


@pytest.mark.search
def test_the_times_are_those_of_the_simulated_engines(
    dry_run: dict[str, Any], modules: None
) -> None:
    from kernel_portfolio.simulated import SimulatedKernels

    for index, entry in enumerate(dry_run["results"]["measured"]):
        timer, _ = SimulatedKernels(entry["engine"], index).open()
        true = {cache: timer.truth("burst", cache) for cache in ("cold", "hot")}
        for name, ms in entry["kernels"].items():
            text = f"eng{entry['engine']}" + (f":KERNEL_CFG={name}" if name != "listed" else "")
            wanted = (true["cold"][text] * true["hot"][text]) ** 0.5
            assert ms == pytest.approx(wanted, rel=0.02), name
        assert min(entry["rivals"].values()) == pytest.approx(true["cold"]["eng0"], rel=0.02)


@pytest.mark.search
def test_a_time_limit_cuts_off_layers(tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    done = run(SCRIPT, "--device", "cpu", "--time-limit", "0.1", "--json", path)
    assert done.returncode == 1
    data = json.loads(path.read_text())
    assert data["complete"] is False
    assert data["results"]["failures"] == ["time limit: 18 of 18 not measured"]


@pytest.mark.search
def test_the_kernel_that_cudnn_lists_is_not_built_twice(modules: None) -> None:
    from kernel_portfolio.measure import kernels

    from cudnn_autotune.engines.configs import Candidate

    listed = Candidate(70, {"KERNEL_CFG": 2, "SPLIT_K_BUF": 0}, 0, (), (), "", "A", 0)
    text = "eng70:KERNEL_CFG=2,SPLIT_K_BUF=0"
    named = kernels(Candidate(**{**vars(listed), "text": text}), range(4))
    assert list(named) == ["listed", "0", "1", "3"]
    assert named["3"].text == "eng70:KERNEL_CFG=3,SPLIT_K_BUF=0"
    assert named["3"].heuristic_mode == ""


def test_an_engine_that_is_not_listed_is_refused(modules: None) -> None:
    import simulation
    from kernel_portfolio.measure import measure

    timer = simulation.preset("forum-l4")
    with pytest.raises(ValueError, match="engine 78 is not listed"):
        measure(timer, timer.candidates, 78)


# ---- the portfolio --------------------------------------------------------------------------


def entry(kernels: dict[str, float], rough: dict[str, float], best: float = 1.0) -> dict[str, Any]:
    return {"kernels": kernels, "rough": rough, "rivals": {"eng1": best, "eng2": 2 * best}}


def test_a_kernel_that_was_not_raced_counts_as_slower_than_those_that_were(modules: None) -> None:
    from kernel_portfolio.greedy import relative

    found = relative(entry({"0": 1.0, "1": 3.0}, {"0": 1.1, "1": 2.9, "2": 2.5, "3": 8.0}, 2.0))
    assert found == {"0": 0.5, "1": 1.5, "2": 1.5, "3": 4.0}


def test_mean_is_of_the_best_of_the_chosen_and_never_worse_than_listed(modules: None) -> None:
    from kernel_portfolio.greedy import mean

    layers = [{"0": 0.5, "1": 0.9}, {"0": 3.0, "1": 0.5}, {"1": 2.0}]
    assert mean(layers, []) == 1
    assert mean(layers, ["0"]) == pytest.approx(0.5 ** (1 / 3))
    assert mean(layers, ["0", "1"]) == pytest.approx(0.25 ** (1 / 3))


def test_greedy_takes_what_helps_most_and_stops(modules: None) -> None:
    from kernel_portfolio.greedy import greedy

    layers = [{"0": 0.8, "1": 0.5, "9": 0.7}, {"0": 0.8, "1": 1.5, "9": 0.7}]
    layers = [{**layer, "listed": 0.1, "5": 1.2} for layer in layers]
    # 9 is the best alone; 1 adds to it; neither 0 nor 5 does, and the listed one is free.
    found = greedy(layers)
    assert [name for name, _ in found] == ["9", "1"]
    assert found[-1][1] == pytest.approx((0.5 * 0.7) ** 0.5)
    assert [name for name, _ in greedy(layers, most=1)] == ["9"]
    assert greedy([{"0": 1.0, "1": 1.3}]) == []


def test_a_record_is_rendered(modules: None, tmp_path: Path) -> None:
    """Also where a layer lacks an engine, and no kernel of another helps."""
    from kernel_portfolio import report

    fast = entry({"0": 0.7, "4": 0.9, "listed": 1.2}, {"0": 0.7, "4": 0.9, "listed": 1.2})
    slow = entry({"0": 1.7, "listed": 1.5}, {"0": 1.7, "listed": 1.5})
    told = {"built": 3, "build_s": 0.9}
    measured = [
        {"layer": "a", "op": "dgrad", "engine": 78, "shipped": [4], **told, **fast},
        {"layer": "a", "op": "fprop", "engine": 71, "shipped": [], **told, **slow},
        {"layer": "b", "op": "dgrad", "engine": 78, "shipped": [4], **told, **fast},
    ]
    data: dict[str, Any] = {
        "environment": {"device": "cuda"},
        "results": {"measured": measured, "failures": ["b/fprop: lost"]},
    }
    portfolios, layers = report.tables(data)
    assert list(portfolios.rows) == [
        ("eng78, dgrad", "the one that cuDNN lists", "1", "1.0000", "0 of 2"),
        ("eng78, dgrad", "0", "1", "0.7000", "2 of 2"),
        ("eng78, dgrad", "the package's: 4", "1", "0.9000", "2 of 2"),
        ("eng78, dgrad", "all that it has", "2", "0.7000", "2 of 2"),
        ("eng71, fprop", "the one that cuDNN lists", "1", "1.0000", "0 of 1"),
        ("eng71, fprop", "all that it has", "1", "1.0000", "0 of 1"),
    ]
    assert "300 ms a kernel" in portfolios.note
    assert list(layers.rows) == [("a", "0: 0.700", "0: 1.700"), ("b", "0: 0.700", "–")]
    assert "b/fprop: lost" in layers.note
    report.plot(data, tmp_path / "k.png")
    assert (tmp_path / "k.png").exists()
    assert report.tables({**data, "results": {}}) == []
