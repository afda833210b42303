"""lone_layer.py and capped.py: dry runs on the simulated GPU, and their parts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import (
    assert_default_cases,
    assert_help,
    assert_plotted,
    assert_rendered,
    record,
    run,
    whole_record,
)
from simulation import engine, timer_of

import cudnn_autotune as ca

DRY_RUNS = {
    "lone_layer": "--idle-s 0.05 --steady-s 0.2 --steps 2 --warm-steps 1 --modes race,auto "
    "--iterations 1,10,100",
    "capped": "--cases vgg16_conv4_2/dgrad/float16,sd_unet_down_1280/wgrad/float16 --bursts 3 "
    "--solo-s 0.3 --modes sample_once,auto",
}
CASES = ["vgg16_conv4_2/dgrad/float16/nhwc", "sd_unet_down_1280/wgrad/float16/nhwc"]
LONE_CASES = [
    f"{layer}.1.conv2/{op}" for layer in ("layer2", "layer3") for op in ("fprop", "dgrad")
]


@pytest.mark.parametrize("script", DRY_RUNS)
def test_help(script: str) -> None:
    assert_help(script)


@pytest.mark.parametrize("script", DRY_RUNS)
def test_dry_run_leaves_a_whole_record(dry_runs: Path, script: str) -> None:
    whole_record(dry_runs, script)
    assert_plotted(dry_runs, script)


def test_capped_judges_every_pick_by_both_truths(dry_runs: Path, modules: None) -> None:
    from capped_layers import report

    results = record(dry_runs, "capped")["results"]
    assert list(results["cases"]) == CASES
    assert results["failures"] == []
    for entry in results["cases"].values():
        assert entry["failed"] == []
        assert {mode: len(row) for mode, row in entry["picks"].items()} == {
            "sample_once": 2,
            "auto": 2,
        }
        truths = report.judged(entry)
        assert set(truths) == {"burst", "sustained"}
        for mode in entry["picks"]:
            for name in truths:
                found = report.regrets(entry, truths, mode, name)
                assert len(found) == 2, "every pick was measured to the end"
                assert min(found) >= 1
        texts = [block["text"] for block in entry["solo"]]
        assert texts == texts[::-1], "sustained runs go one way and then the other"
        assert truths["burst"].best in texts
        for block in entry["solo"]:
            trace = block["trace"]
            assert trace["t_ms"] == sorted(trace["t_ms"])
            assert trace["t_ms"][-1] >= 250
            assert len(trace["t_ms"]) == len(trace["time_ms"]) == len(trace["clock_mhz"])


def test_capped_sees_the_order_turn(dry_runs: Path, modules: None) -> None:
    """The simulated board holds its clock in bursts and not under a load that lasts."""
    from capped_layers import report

    entry = record(dry_runs, "capped")["results"]["cases"][CASES[0]]
    truths = report.judged(entry)
    clock = report.clock_of(entry, truths["burst"].best)
    assert clock is not None
    assert clock < 0.95 * entry["burst"]["clock_mhz"]
    assert truths["sustained"].times_ms[truths["burst"].best] > 1.02 * min(
        truths["burst"].times_ms.values()
    )


def test_lone_layer_times_the_layers_alone_and_inside(dry_runs: Path, modules: None) -> None:
    from lone import report

    results = record(dry_runs, "lone_layer")["results"]
    assert "failed" not in results
    assert [row["mode"] for row in results["inside"]] == ["race", "auto", "auto", "race"]
    assert sorted(report.cases(results)) == sorted(LONE_CASES)
    for row in results["inside"]:
        assert row["step_ms"] > 0
        for case in LONE_CASES:
            # Two layers of a stage are alike, and two steps were timed.
            assert row["calls"][case]["n"] == 4
            assert 0 < row["calls"][case]["median"] < row["step_ms"]
    for case in LONE_CASES:
        plain = [row for row in results["plain"] if row["case"] == case]
        assert [row["iterations"] for row in plain] == [1, 10, 100]
        assert all(row["mean_ms"] > 0 for row in plain)
        picked = {report.pick_of(results, case, mode) for mode in ("race", "auto")}
        queued = [row for row in results["queued"] if row["case"] == case]
        assert {row["text"] for row in queued if row["data"] == report.RANDOM} == picked
        assert sum(row["data"] == report.OWN for row in queued) == 1
        for row in queued:
            assert list(row["after"]) == ["1", "10", "100"]
            assert all(found["time_ms"] > 0 for found in row["after"].values())
            assert row["trace"]["t_ms"][-1] >= 150


def test_records_are_rendered(dry_runs: Path, tmp_path: Path) -> None:
    assert_rendered(dry_runs, DRY_RUNS, tmp_path)


@pytest.mark.parametrize("script", DRY_RUNS)
def test_a_record_cut_short_still_has_its_tables(
    dry_runs: Path, script: str, modules: None, tmp_path: Path
) -> None:
    import importlib

    report = importlib.import_module({"lone_layer": "lone", "capped": "capped_layers"}[script])
    report = importlib.import_module(f"{report.__name__}.report")
    data = record(dry_runs, script)
    if script == "capped":
        first, second = data["results"]["cases"].values()
        del first["sustained"]
        del second["burst"], second["sustained"]
        second["failed"].append({"step": "truths", "error": "RuntimeError: no candidate runs"})
    else:
        data["results"] = {"inside": data["results"]["inside"][:1]}
    shown = "\n".join(table.markdown() for table in report.tables(data))
    assert ("no candidate runs" in shown) == (script == "capped")
    report.plot(data, tmp_path / "cut.png")
    assert (tmp_path / "cut.png").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("capped", ("--cases", "no such layer"), "--cases"),
        ("capped", ("--modes", "fastest"), "--modes"),
        ("capped", ("--runs", "0"), "--runs"),
        ("capped", ("--layers", "no-such-file.json"), "--layers"),
        ("capped", ("--solo-s", "0"), "--solo-s"),
        ("lone_layer", ("--modes", "fastest"), "--modes"),
        ("lone_layer", ("--modes", "race"), "--reference"),
        ("lone_layer", ("--ops", "forward"), "--ops"),
        ("lone_layer", ("--iterations", "1,0"), "--iterations"),
        ("lone_layer", ("--steps", "0"), "--steps"),
        ("lone_layer", ("--device", "cpu", "--layers", "layer9.conv"), "layer9.conv"),
    ],
)
def test_bad_options_are_named(script: str, arguments: tuple[str, ...], named: str) -> None:
    done = run(script, *arguments)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


# ---- parts ----------------------------------------------------------------------------------


def test_the_default_cases_are_there(modules: None) -> None:
    assert_default_cases("capped")


def test_leaders_are_of_different_engines_first(modules: None) -> None:
    from capped_layers.measure import leaders

    engines = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 3, "far": 4}
    times = {"a": 1.0, "b": 1.01, "c": 1.02, "d": 1.05, "e": 1.1, "far": 1.5}

    class Named:
        def __init__(self, engine: int) -> None:
            self.engine = engine

    by_text = {text: Named(number) for text, number in engines.items()}
    order = sorted(times, key=times.__getitem__)
    assert leaders(order, by_text, times, 6) == ["a", "d", "e", "b", "c"]
    assert leaders(order, by_text, times, 3) == ["a", "d", "b"]
    assert leaders(order, by_text, times, 1) == ["a"]


def test_a_layer_that_fails_is_recorded(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from capped_layers import measure
    from common.sources import SimulatedSource

    class Broken(SimulatedSource):
        def open(self) -> tuple[Any, Any]:
            timer = timer_of(engine("eng1:a", 1.0, error="CUDNN_STATUS_EXECUTION_FAILED"))
            return timer, timer.candidates

    monkeypatch.setattr(measure, "source_of", lambda request: Broken())
    request = {"device": "cpu", "modes": ["race"], "runs": 1, "seconds": 20.0}
    request |= {"bursts": 2, "rest_s": 0.0, "solo_s": 0.1, "leaders": 2}
    told = list(measure.measure(request))
    assert [part["part"] for part in told] == ["pick", "failed"]
    assert "no candidate runs" in told[0]["pick"]["error"]
    assert "no candidate runs" in told[1]["error"]


def test_a_candidate_that_fails_alone_is_told(modules: None) -> None:
    from capped_layers.measure import solo

    timer = timer_of(engine("eng1:a", 1.0, fails_at_ms=40.0))
    (candidate,) = timer.candidates.all()
    assert solo(timer, candidate, 1.0, 0.2) == (None, {"error": "CUDNN_STATUS_EXECUTION_FAILED"})


@pytest.mark.parametrize("iterations", [[1, 10, 100, 1000], [7], [3, 25]])
def test_lone_batches_end_where_a_count_is_asked_for(modules: None, iterations: list[int]) -> None:
    from lone.alone import plan

    sizes = plan(iterations, 0.04, 0.5)
    ends = {sum(sizes[: i + 1]) for i in range(len(sizes))}
    assert set(iterations) <= ends
    assert 0.5e3 <= sum(sizes) * 0.04 <= 0.6e3


def test_watched_layers_compute_what_the_model_did(modules: None) -> None:
    """Gradients of the model with and without them, and the operands that they keep."""
    from common.network import Miniature
    from lone.watched import Training, Watch, watched

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        Training(model, (2, 3, 8, 8), "cpu", torch.float32, watch).step()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    watch = Watch("cpu")
    model = Miniature().to(memory_format=torch.channels_last)
    expected = gradients(model)
    groups = watched(model, ["layer2.1.conv2"], watch)
    assert [len(group) for group in groups.values()] == [2]
    assert all(isinstance(layer, ca.Conv2d) for layer in groups["layer2.1.conv2"])
    watch.recording = watch.capturing = True
    found = gradients(model)
    assert expected.keys() == found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])
    times = watch.take()
    assert set(times) == {("layer2.1.conv2", op) for op in ("fprop", "dgrad", "wgrad")}
    assert all(len(row) == 2 and min(row) > 0 for row in times.values())
    held = watch.operands["layer2.1.conv2"]
    assert held["x"].shape == held["g"].shape == (2, 8, 8, 8)
    assert float(held["g"].abs().max()) > 0


@pytest.mark.parametrize("names", [["fc"], ["nothing"], ["layer2.1.conv2", "layer2.0.conv2"]])
def test_layers_that_cannot_be_watched_are_named(modules: None, names: list[str]) -> None:
    from common.network import Miniature
    from lone.watched import Watch, watched

    with pytest.raises(ValueError, match=names[-1]):
        watched(Miniature(), names, Watch("cpu"))


def test_portrait_counts_zeros(modules: None) -> None:
    from lone.watched import portrait

    found = portrait(torch.tensor([0.0, 2.0, 0.0, 2.0]))
    assert found["zeros"] == 0.5
    assert found["std"] == pytest.approx(math.sqrt(4 / 3))
