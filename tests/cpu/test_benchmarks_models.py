"""models.py: a dry run through Inductor on the CPU, and how its figures are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import assert_rendered, main, record, run, whole_record
from torch import nn

import cudnn_autotune as ca

SCRIPT = "models"
SHORT = "--rounds 4 --block-ms 1 --settle-s 0"
# Inductor compiles for half a minute of CPU time here, so there is one case.
CASE = "miniature/train/channels_last"
ONE = "--models miniature --steps train --layouts channels_last"
DRY_RUNS = {SCRIPT: f"{ONE} --pytorch pytorch_on_10 --warm 1 {SHORT}"}
WAYS = ["compile", "compile_ours"]


def test_dry_run_leaves_a_whole_record(dry_runs: Path) -> None:
    assert whole_record(dry_runs, SCRIPT)["results"]["failures"] == []


def test_what_was_compiled_ahead_is_found(dry_runs: Path, modules: None) -> None:
    from model_steps.report import not_found

    results = record(dry_runs, SCRIPT)["results"]
    (ahead,) = [results["warm_up"][CASE]]
    assert list(ahead["ways"]) == WAYS
    assert not_found(ahead["ways"]["compile"]["caches"])
    (measured,) = results["runs"]
    for way in measured["ways"].values():
        assert way["caches"]["autograd_cache_hit"] == 1
        assert way["caches"]["fxgraph_cache_hit"] == 2
        assert not not_found(way["caches"])


def test_every_way_takes_turns(dry_runs: Path) -> None:
    (measured,) = record(dry_runs, SCRIPT)["results"]["runs"]
    assert "/".join((measured["model"], measured["step"], measured["layout"])) == CASE
    assert measured["pytorch"] == "pytorch_on_10"
    assert measured["replayed"] == "calls"
    assert list(measured["times_ms"]) == WAYS
    for times in measured["times_ms"].values():
        assert len(times) == 4
        assert min(times) > 0


def test_results_are_compared_with_float32(dry_runs: Path) -> None:
    (measured,) = record(dry_runs, SCRIPT)["results"]["runs"]
    for name, way in measured["ways"].items():
        assert way["first_step_s"] > 0
        assert ("choices" in way) == (name == "compile_ours")
        assert 0 <= way["errors"]["outputs"] < 1e-5
        assert 0 <= way["errors"]["gradients"] < 1e-4
    assert measured["ways"]["compile_ours"]["errors"]["beyond"] == []


def test_the_record_can_be_published(dry_runs: Path, tmp_path: Path) -> None:
    assert_rendered(dry_runs, [SCRIPT], tmp_path)


def test_a_process_that_hangs_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    options = f"--device cpu {ONE} --warm 0 {SHORT} --process-limit 0.1"
    done = run(SCRIPT, *options.split(), "--json", tmp_path / "models.json")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    data = record(tmp_path, SCRIPT)
    names = ["pytorch_off", "pytorch_on_10"]
    values = [f"worker {name}:{CASE} ran past its time limit of 0.1 s" for name in names]
    assert data["results"]["failures"] == values
    assert [entry["pytorch"] for entry in data["results"]["runs"]] == names
    assert data["complete"] is False
    assert values[0] in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "infer,sleep"), "--steps: ['sleep'] unknown; allowed: infer, infer_frozen"),
        (("--layouts", "nhwc"), "--layouts: ['nhwc'] unknown"),
        (("--pytorch", "fast"), "--pytorch: ['fast'] unknown"),
        (("--batch", "0"), "--batch must be 1 or more"),
        (("--rounds", "1"), "--rounds must be 2 or more"),
        (("--mode", "max-autotune-no-cudagraphs"), "--warm must be 1 or 0"),
        (("--mode", "reduce-overhead"), "invalid choice"),
    ],
)
def test_bad_arguments(
    modules: None, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(SCRIPT, "--device", "cpu", *arguments)
    assert status != 0
    assert message in f"{status}{capsys.readouterr().err}"


def test_a_round_and_the_next_are_mirror_images(modules: None) -> None:
    from model_steps.turns import take_turns

    calls: list[str] = []
    replays = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = take_turns(replays, {"a": 1, "b": 2, "c": 3}, rounds=6, device="cpu")
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys("abc", 6)
    order = [name for name in calls if name == "a"]
    assert len(order) == 6
    assert len(calls) == 6 * (1 + 2 + 3)
    blocks = [calls[6 * i : 6 * i + 6] for i in range(6)]
    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        assert first == second[::-1]
        assert sorted(first) == list("abbccc")


def test_blocks_are_as_long_as_asked_for(modules: None) -> None:
    import time

    from model_steps.turns import calibrate

    counts = calibrate({"slow": lambda: time.sleep(0.02)}, block_ms=50, least_s=0.0, device="cpu")
    assert 1 <= counts["slow"] <= 3


def test_ratios_are_taken_round_by_round(modules: None) -> None:
    from model_steps.report import ratios, tables

    times = {"compile": [2.0, 3.0, 4.4], "compile_ours": [1.0, 2.0, 4.0]}
    measured: dict[str, Any] = {
        "model": "resnet50",
        "step": "train",
        "layout": "contiguous",
        "pytorch": "pytorch_off",
        "ways": {},
        "times_ms": times,
    }
    assert ratios(measured) == pytest.approx([2.0, 1.5, 1.1])
    assert ratios({**measured, "times_ms": {"compile": [1.0]}}) == []
    asked = {"batch": 64, "size": 224, "mode": "default", "sampling": "race", "fresh": False}
    asked |= {"rounds": 3, "block_ms": 50.0, "warm": 6}
    data: dict[str, Any] = {
        "environment": {"device": "cuda"},
        "arguments": asked,
        "results": {"runs": [{**measured, "replayed": "calls"}], "failures": ["one failed"]},
    }
    steps, first, errors = (table.markdown() for table in tables(data))
    row = "| resnet50, training, contiguous | 3.000 | 2.000 | 1.500 (1.300 to 1.750) |"
    assert row in steps
    assert "since no graph was captured: resnet50, training, contiguous, benchmark off" in steps
    assert "resnet50, training, contiguous" in first
    assert "one failed." in errors


def test_a_result_that_is_further_off_is_named(modules: None) -> None:
    from model_steps.measure import compared

    exact = {"outputs": torch.ones(4), "conv.weight": torch.ones(2, 2, 1, 1)}
    theirs = {name: tensor + 0.01 for name, tensor in exact.items()}
    ours = {"outputs": exact["outputs"] + 0.015, "conv.weight": exact["conv.weight"] * 1.1}
    result = compared({"compile": theirs, "compile_ours": ours}, exact)["ways"]
    assert result["compile"] == {"outputs": 0.01, "gradients": 0.01}
    assert result["compile_ours"] == {
        "outputs": 0.015,
        "gradients": 0.1,
        "beyond": ["conv.weight"],
    }
    ours["outputs"] = exact["outputs"] * float("nan")
    result = compared({"compile": theirs, "compile_ours": ours}, exact)["ways"]
    assert result["compile_ours"]["outputs"] is None
    assert result["compile_ours"]["beyond"] == ["outputs", "conv.weight"]


@pytest.mark.parametrize("step", ["infer", "train"])
def test_a_subject_is_the_same_each_time(
    modules: None, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Ways in one process, and processes, compute the same: no dropout, one seed; the images of
    an inference have passed every batch norm."""
    import copy

    from model_steps import subject
    from model_steps.cases import Case
    from model_steps.subject import Step, Subject

    def create(name: str, device: str) -> nn.Module:
        norm = nn.BatchNorm2d(4)
        return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Dropout(0.5), nn.Flatten())

    monkeypatch.setattr(subject, "create", create)
    case = Case("any", step, "channels_last")
    one, two = (Subject(case, [2, 3, 8, 8], "cpu") for _ in range(2))
    assert one.images.is_contiguous(memory_format=torch.channels_last)
    norm = one.model[1]  # type: ignore[index]
    assert norm.momentum == nn.BatchNorm2d(4).momentum
    expected = one.reference()
    assert expected.keys() == ({"outputs", "0.weight"} if step == "train" else {"outputs"})
    model = copy.deepcopy(two.model)
    mine = Step(two, model, model, autocast=False)
    for _ in range(2):  # gradients are not added up
        mine()
        for name, tensor in mine.results().items():
            torch.testing.assert_close(tensor, expected[name])
    outputs = expected["outputs"].view(2, 4, -1)
    torch.testing.assert_close(outputs.mean((0, 2)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs.var((0, 2)), torch.ones(4), atol=0.05, rtol=0)


def test_only_our_way_has_our_layers(modules: None) -> None:
    from model_steps.cases import WAYS as KNOWN
    from model_steps.cases import Case
    from model_steps.subject import Subject

    subject = Subject(Case("any", "infer", "contiguous"), [2, 3, 16, 16], "cpu")
    assert list(KNOWN) == WAYS
    for name, way in KNOWN.items():
        step = subject.step(way, "default")  # nothing is compiled before it runs
        kinds = {type(m) for m in step.model.modules() if isinstance(m, nn.Conv2d)}
        assert kinds == ({ca.Conv2d} if name == "compile_ours" else {nn.Conv2d})
        assert all(m.sampling is None for m in step.model.modules() if isinstance(m, ca.Conv2d))
