"""models.py: a dry run on the CPU, and how its figures are made."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_scripts import (
    BENCHMARKS,
    assert_rendered,
    main,
    publish,
    record,
    run,
    whole_record,
)
from model_steps import cases, engines_alone, measure
from model_steps import subject as subjects
from model_steps.cases import EVERYWHERE, MODELS, Case
from model_steps.cases import WAYS as KNOWN
from model_steps.gpu_lock import GpuLock
from model_steps.networks import NETWORKS as KNOWN_NETWORKS
from model_steps.report import rows, tables
from model_steps.subject import Subject, errors
from model_steps.turns import calibrate, take_turns
from torch import nn
from torch._inductor import compile_fx, config

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.nn.backend import groups, programs
from cudnn_autotune.timers.gpu_timer import GpuTimer

SCRIPT = "models"
SHORT = "--batches 2 --rounds 4 --block-ms 1 --settle-s 0"
# Inductor compiles for half a minute of CPU time here, so there is one model.
CASE = "miniature/train/channels_last"
ONE = "--models miniature --steps train"
MODES = ["pytorch_on_10", "pytorch_off"]
WAYS = ["eager", "compile", "compile_frozen", "convert", "backend"]
TRAINING = ["eager", "compile", "convert", "backend"]
DRY_RUNS = {
    SCRIPT: f"--models miniature --ways {','.join(WAYS)} --pytorch {','.join(MODES)} "
    f"--at-once 2 {SHORT}"
}
NETWORKS = (
    *("sd_unet", "sd_vae_decoder", "detector", "unet", "stylegan2", "esrgan"),
    *("unet3d", "video_decoder"),
    *("hifigan", "conv_tasnet", "whisper_encoder", "wav2vec2"),
)
MILLIONS = (
    *(859.521, 49.489, 11.167, 31.038, 27.933, 16.698),
    *(31.194, 63.240),
    *(13.926, 5.051, 8.205, 94.343),
)


def runs(dry_runs: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(PyTorch's mode, step) -> what one process measured."""
    found = record(dry_runs, SCRIPT)["results"]["runs"]
    return {(entry["pytorch"], entry["step"]): entry for entry in found}


def test_dry_run_leaves_a_whole_record(dry_runs: Path) -> None:
    assert whole_record(dry_runs, SCRIPT)["results"]["failures"] == []
    assert runs(dry_runs).keys() == {(mode, step) for mode in MODES for step in ("infer", "train")}


def test_every_way_takes_turns(dry_runs: Path) -> None:
    """All in the process of the first mode, eager ones in those of the others; what makes weights
    constants does not train."""
    for (mode, step), measured in runs(dry_runs).items():
        ways = WAYS if step == "infer" else TRAINING
        assert measured["batch"] == 2
        assert list(measured["times_ms"]) == (ways if mode == MODES[0] else ["eager", "convert"])
        assert measured["by_calls"] == list(measured["times_ms"]), "a CPU has no graphs"
        for times in measured["times_ms"].values():
            assert len(times) == 4
            assert min(times) > 0


def test_results_are_compared_with_float32(dry_runs: Path) -> None:
    for (_, step), measured in runs(dry_runs).items():
        assert measured["ways"].keys() == measured["times_ms"].keys()
        for name, way in measured["ways"].items():
            assert way["first_step_s"] > 0
            assert (way.get("graphs", 0) > 0) == (name in ("compile", "compile_frozen", "backend"))
            assert ("choices" in way) == (name in ("convert", "backend"))
            assert 0 <= way["errors"]["outputs"] < 1e-5
            assert ("gradients" in way["errors"]) == (step == "train")
            assert 0 <= way["errors"].get("gradients", 0) < 1e-4
        assert measured["ways"]["convert"]["errors"]["beyond"] == []


def test_the_record_can_be_published(dry_runs: Path, tmp_path: Path) -> None:
    assert_rendered(dry_runs, [SCRIPT], tmp_path)
    assert (tmp_path / "results/gpu/models.png").read_bytes().startswith(b"\x89PNG")


def test_records_of_two_gpus_become_one_section(dry_runs: Path, tmp_path: Path) -> None:
    results, pages = tmp_path / "results", tmp_path / "pages"
    publish(dry_runs, [SCRIPT], results)
    whole = results / "gpu" / "models.json"
    data = json.loads(whole.read_text())
    for number, step in enumerate(("infer", "train"), 1):
        mine = [entry for entry in data["results"]["runs"] if entry["step"] == step]
        part = {**data, "results": {"runs": mine, "failures": [f"part {number} failed"]}}
        (results / "gpu" / f"models.part{number}.json").write_text(json.dumps(part))
    arguments = ("--results", results, "--pages", pages)
    assert main("render_results", *arguments) == 0
    first, *_ = (pages / "gpu.md").read_text().split("## models.part1")
    whole.unlink()
    assert main("render_results", *arguments) == 0
    text = (pages / "gpu.md").read_text()
    assert main("render_results", *arguments, "--check") == 0
    assert text.count("## models") == 1
    for number in (1, 2):
        assert f"[Record](../results/gpu/models.part{number}.json)" in text
        assert f"part {number} failed." in text
    for step in ("inference", "training"):
        (row,) = (
            line
            for line in first.splitlines()
            if line.startswith(f"| miniature | {step}, ch") and "*" in line
        )
        assert row in text
    assert (results / "gpu" / "models.png").exists()


@pytest.mark.slow
def test_a_process_that_hangs_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    modes = f"--pytorch {','.join(MODES)}"
    options = f"--device cpu {ONE} {modes} {SHORT} --at-once 1 --process-limit 0.1"
    done = run(SCRIPT, *options.split(), "--json", tmp_path / "models.json")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    data = record(tmp_path, SCRIPT)
    values = [f"worker {name}:{CASE} ran past its time limit of 0.1 s" for name in MODES]
    assert data["results"]["failures"] == values
    assert data["complete"] is False
    assert values[0] in done.stderr


@pytest.mark.slow
def test_what_there_is_no_time_for_is_counted(tmp_path: Path) -> None:
    options = f"--device cpu {ONE} {SHORT} --time-limit 5"
    assert run(SCRIPT, *options.split(), "--json", tmp_path / "models.json").returncode == 1
    results = record(tmp_path, SCRIPT)["results"]
    assert results == {"runs": [], "failures": ["time limit: 3 of 3 processes were not run"]}


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    options = f"--device cpu {ONE} {SHORT} --rounds 1000000 --ways eager --pytorch pytorch_off"
    command = [sys.executable, str(BENCHMARKS / "models.py"), *options.split(), "--json", str(path)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 120
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    data = record(tmp_path, SCRIPT)
    assert data["complete"] is False
    assert data["results"]["runs"][0]["ways"]["eager"]["first_step_s"] > 0


@pytest.fixture
def request_for(tmp_path: Path) -> dict[str, Any]:
    """What a worker is asked: eager steps of a miniature, in two batches."""
    case = {"model": "any", "step": "infer", "layout": "contiguous"}
    asked = {"case": case, "batches": [1, 2], "ways": ["eager", "convert"], "device": "cpu"}
    asked["limit_s"] = 1000.0
    asked |= {"pytorch": "pytorch_off", "sampling": "race", "store": str(tmp_path)}
    return asked | {
        "lock": str(tmp_path / "lock"),
        "rounds": 2,
        "block_ms": 0.01,
        "settle_s": 0,
    }


@pytest.mark.slow
def test_what_is_ready_takes_turns_before_the_time_is_up(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three ways the second would take minutes, and catches whatever is raised within it."""
    first_step = measure._first_step

    def slow(subject: Any, name: str, *more: Any) -> Any:
        while name == "convert":
            with contextlib.suppress(Exception):
                time.sleep(100)
        return first_step(subject, name, *more)

    monkeypatch.setattr(measure, "_first_step", slow)
    request = request_for | {"ways": ["eager", "convert", "convert_race"]}
    before = signal.getsignal(signal.SIGALRM)
    parts = list(measure.measure(request | {"limit_s": measure._TURNS_S + 8}))
    kinds = [(part["batch"], part["part"], part.get("step", part.get("way"))) for part in parts]
    assert kinds == [
        *((2, "way", "eager"), (2, "failed", "convert"), (2, "failed", "convert_race")),
        *((2, "turns", None), (2, "compared", None)),
        *((1, "failed", "eager"), (1, "failed", "convert"), (1, "failed", "convert_race")),
    ]
    assert {part["error"] for part in parts if part["part"] == "failed"} == {
        "no time was left for it"
    }
    assert list(parts[3]["times_ms"]) == ["eager"]
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_layout_of_a_converted_model(request_for: dict[str, Any]) -> None:
    ways = ["convert", "convert_last", "convert_auto"]
    for name in ("infer", "train"):
        subject = Subject(Case("any", name, "contiguous"), 2, "cpu")
        steps = {way: subject.step(KNOWN[way], 2) for way in ways}
        channels_last = {
            way: all(
                weight.is_contiguous(memory_format=torch.channels_last)
                for weight in step.model.parameters()
                if weight.dim() == 4
            )
            for way, step in steps.items()
        }
        assert not channels_last["convert"]
        assert channels_last["convert_last"]
        assert len(ca.conversion(steps["convert_auto"].model).memory_format.times_ms) == 2
    parts = list(measure.measure(request_for | {"ways": ["eager", *ways], "batches": [1]}))
    assert not [part for part in parts if part["part"] == "failed"]


def test_a_model_is_converted_to_engines_alone(request_for: dict[str, Any]) -> None:
    """Its choices are not those of the model that may have other implementations."""
    ways = ["convert_engines", "convert"]
    parts = list(measure.measure(request_for | {"ways": ["eager", *ways], "batches": [1]}))
    assert not [part for part in parts if part["part"] == "failed"]
    assert KNOWN["convert_engines"].sampling == engines_alone.NAME

    offered = replace(ATEN, text="fast@1:BLOCK=64")
    listed = SimpleNamespace(
        of_mode=lambda _: [], all=lambda: [], aten_uses_cudnn=True,
        beyond=lambda: [ATEN, offered], similar=lambda: [offered],
    )  # fmt: skip
    seen: list[Any] = []
    mode = SimpleNamespace(select=lambda candidates, *_: seen.append(candidates))
    engines_alone.EnginesAlone(mode).select(listed, None, None)  # type: ignore[arg-type]
    assert [*seen[0].beyond(), *seen[0].similar()] == [ATEN]


def test_a_model_is_converted_with_its_norms() -> None:
    subject = Subject(Case("miniature", "train", "channels_last"), 1, "cpu")
    for name in ("convert", "convert_norms"):
        norms = ca.conversion(subject.step(KNOWN[name], 1).model).norms
        assert bool(norms) == (name == "convert_norms")


def test_batches_that_are_asked_for() -> None:
    unet, training = (Case("sd_unet", step, "contiguous") for step in ("infer", "train"))
    decoder = Case("sd_vae_decoder", "train", "contiguous")
    assert list(unet.batches(None)) == [1, 8]
    assert unet.batches("largest") == [8]
    assert unet.batches("smallest") == [1]
    assert training.batches("smallest") == [8]
    assert not decoder.batches("largest")
    assert decoder.batches([4]) == [4]


@pytest.mark.slow
def test_every_compiled_way_has_a_program_of_its_own(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was compiled before, in this batch or another."""
    frozen: list[bool] = []

    def compile_only(graph: Any, inputs: Any, *_: Any, config_patches: Any, **more: Any) -> Any:
        with config.patch(config_patches):
            frozen.append(config.freezing)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compile_only)
    names = [name for name, way in KNOWN.items() if way.compile is not None]
    for ways, batches in ((names, [2, 1]), (names[::-1], [1])):
        parts = list(measure.measure(request_for | {"ways": ways, "batches": batches}))
        assert not [part for part in parts if part["part"] == "failed"]
        graphs = [(p["batch"], p["way"], p["graphs"]) for p in parts if p["part"] == "way"]
        assert graphs == [(batch, name, 1) for batch in batches for name in ways]
        # The first is the convolution that loads the compiler.
        assert frozen == [False, *[KNOWN[name].freezing for name in ways] * len(batches)]
        frozen.clear()


@pytest.mark.slow
def test_a_way_that_runs_the_code_of_another_is_named(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:

    same = replace(cases.WAYS["compile_frozen"], compile={})
    monkeypatch.setitem(cases.WAYS, "compile_frozen", same)
    asked = request_for | {"ways": ["compile", "compile_frozen"], "batches": [1]}
    failed = [part for part in measure.measure(asked) if part["part"] == "failed"]
    assert [(part["step"], part["error"]) for part in failed] == [
        ("compile_frozen", "it ran what was compiled before")
    ]


def test_a_way_that_fails_is_named_and_the_others_are_measured(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: nn.Module, **_: Any) -> nn.Module:
        raise RuntimeError("no such convolution")

    monkeypatch.setattr(ca, "convert", fail)
    parts = list(measure.measure(request_for))
    assert [part["batch"] for part in parts] == [2] * 4 + [1] * 4
    assert [part["part"] for part in parts[:4]] == ["way", "failed", "turns", "compared"]
    assert parts[1]["error"] == "RuntimeError: no such convolution"
    assert list(parts[2]["times_ms"]) == ["eager"]


@pytest.mark.slow
def test_a_batch_that_fails_is_named_and_the_others_are_measured(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Subject.reference

    def fail(self: Subject, batch: int) -> Any:
        if batch == 2:
            raise torch.OutOfMemoryError("too large")
        return reference(self, batch)

    monkeypatch.setattr(Subject, "reference", fail)
    kinds = [(part["batch"], part["part"]) for part in measure.measure(request_for)]
    assert kinds[2:4] == [(2, "turns"), (2, "failed")]
    assert kinds[-2:] == [(1, "turns"), (1, "compared")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "infer,sleep"), "--steps: ['sleep'] unknown; allowed: infer, train"),
        (("--layouts", "nhwc"), "--layouts: ['nhwc'] unknown"),
        (("--pytorch", "fast"), "--pytorch: ['fast'] unknown"),
        (("--ways", "eager,magic"), "--ways: ['magic'] unknown; allowed: eager, compile, "),
        (("--batches", "0"), "--batches"),
        (("--rounds", "1"), "--rounds must be 2 or more"),
        (("--at-once", "0"), "--at-once must be 1 or more"),
    ],
)
def test_bad_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(SCRIPT, "--device", "cpu", *arguments)
    assert status != 0
    assert message in f"{status}{capsys.readouterr().err}"


def test_a_round_and_the_next_are_mirror_images() -> None:
    calls: list[str] = []
    replays = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = take_turns(replays, {"a": 1, "b": 2, "c": 3}, rounds=6, device="cpu")
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys("abc", 6)
    assert len([name for name in calls if name == "a"]) == 6
    assert len(calls) == 6 * (1 + 2 + 3)
    blocks = [calls[6 * i : 6 * i + 6] for i in range(6)]
    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        assert first == second[::-1]
        assert sorted(first) == list("abbccc")


def test_blocks_are_as_long_as_asked_for() -> None:
    counts = calibrate({"slow": lambda: time.sleep(0.02)}, block_ms=50, least_s=0.0, device="cpu")
    assert 1 <= counts["slow"] <= 3


def measured(model: str, pytorch: str, times: dict[str, float], **more: Any) -> dict[str, Any]:
    """What one process has in a record."""
    case = {"model": model, "step": "infer", "layout": "channels_last", "batch": 1}
    found = {way: [ms, ms * 1.5, ms * 0.5] for way, ms in times.items()}  # the clock drifts
    return {**case, "pytorch": pytorch, "ways": {}, "times_ms": found, **more}


def report_data(*runs: dict[str, Any]) -> dict[str, Any]:
    asked = {"sampling": "race", "rounds": 3, "block_ms": 20.0}
    results = {"runs": list(runs), "failures": ["one failed"]}
    return {"environment": {"device": "cuda"}, "arguments": asked, "results": results}


def test_times_of_other_processes_are_compared_by_what_ours_took() -> None:
    """In the second process all is twice as slow; its eager mode is the fastest of PyTorch's."""
    first = {"eager": 4.0, "compile": 3.0, "convert": 2.0, "backend": 1.5}
    data = report_data(
        measured("a", "pytorch_on_10", first, by_calls=["compile"]),
        measured("a", "pytorch_off", {"eager": 5.0, "convert": 4.0}, by_calls=[]),
        measured("a", "pytorch_on_0", {"eager": 1.0}),
    )
    (row,) = rows(data)
    assert row.pytorch() == {
        ("eager", "pytorch_on_10"): 4.0,
        ("compile", "pytorch_on_10"): 3.0,
        ("eager", "pytorch_off"): 2.5,
    }
    assert row.rival("convert") == ("eager", "pytorch_off")
    assert row.rival("backend") == ("compile", "pytorch_on_10"), "a program against a program"
    means, steps, _first_steps, errors = tables(data)
    ratios = dict(zip(means.columns, means.rows[0], strict=True))
    assert ratios["eager / convert"] == "1.250 (1.250 to 1.250, 0 of 1)"
    assert ratios["best torch.compile / backend"].startswith("2.000 ")
    cells = dict(zip(steps.columns, steps.rows[0], strict=True))
    assert cells["eager, benchmark off"] == "2.500"
    assert cells["compile, limit 10"] == "3.000*", "it was called"
    assert "one failed." in errors.note


def test_ways_of_another_run_in_the_same_mode_are_added() -> None:
    """The second run is twice as fast, and measured again what the first one has; the third shares
    no way with them."""
    first = {"eager": 4.0, "compile": 3.0, "convert": 2.0}
    again = {"eager": 1.9, "compile_max": 1.25, "convert": 1.0}
    data = report_data(
        measured("a", "pytorch_on_10", again | {"fuse": 0.75}, peak_bytes={"fuse": 2**21}),
        measured("a", "pytorch_on_10", first | {"backend": 1.75, "backend_compare": 1.75}),
        measured("a", "pytorch_on_10", {"compile_frozen": 1.0}),
    )
    (row,) = rows(data)
    assert row.pytorch() == {
        (way, "pytorch_on_10"): ms
        for way, ms in {"eager": 4.0, "compile": 3.0, "compile_max": 2.5}.items()
    }
    assert row.ours == {"convert": 2.0, "backend": 1.75, "backend_compare": 1.75, "fuse": 1.5}
    assert row.peak_bytes == {"fuse": 2**21}
    means, *_ = tables(data)
    ratios = dict(zip(means.columns, means.rows[0], strict=True))
    assert ratios["best torch.compile / fuse"].startswith("1.667 ")


def test_ratios_are_those_of_the_blocks_of_one_round() -> None:
    """The clock drifts by more than the ways differ, and a block was disturbed."""
    drift = [1.0, 1.2, 1.4, 1.6, 1.8]
    times = {"eager": [1.1 * ms for ms in drift], "convert": [1.0, 1.2, 1.4, 3.2, 1.8]}
    times["compile"] = [2.0, 1.8, 1.6, 1.4, 1.2]
    times["backend"] = [1.0, 0.9, 1.0, 0.7, 0.4]
    run = measured("a", "pytorch_on_10", {}) | {"times_ms": times}
    (row,) = rows(report_data(run))
    ratio = row.against("backend")
    assert (ratio.median, *ratio.quartiles) == pytest.approx((2.0, 2.0, 2.0))
    steps = tables(report_data(run))[1]
    assert dict(zip(steps.columns, steps.rows[0], strict=True))["eager / convert"] == "1.100"
    run["times_ms"]["backend"] = [1.0, 0.9, 0.8, 0.5, 0.4]
    (row,) = rows(report_data(run))
    assert str(row.against("backend")) == "2.000 (2.000 to 2.800)"


def test_the_layout_that_was_chosen_is_compared_with_the_better_one() -> None:
    times = {"eager": 5.0, "convert": 4.0, "convert_last": 2.0, "convert_auto": 2.5}
    means, *_ = tables(report_data(measured("a", "pytorch_on_10", times)))
    ratios = dict(zip(means.columns, means.rows[0], strict=True))
    assert ratios["convert in the better layout / layout auto"].startswith("0.800 ")


def test_what_implementations_gain_is_compared_in_one_process() -> None:
    times = {"eager": 5.0, "convert_engines": 4.5, "convert": 4.0}
    means, *_ = tables(report_data(measured("a", "pytorch_on_10", times)))
    ratios = dict(zip(means.columns, means.rows[0], strict=True))
    assert ratios["convert, engines alone / convert"].startswith("1.125 ")


def test_means_are_geometric_and_count_what_is_slower() -> None:
    data = report_data(
        measured("a", "pytorch_on_10", {"eager": 4.0, "convert": 1.0}),
        measured("b", "pytorch_on_10", {"eager": 1.0, "convert": 4.0}),
        measured("c", "pytorch_on_10", {"eager": 1.0}),
        measured("d", "pytorch_on_10", {}),
    )
    means, steps, *_ = tables(data)
    assert means.rows[0] == ("all: 4", "1.000 (0.250 to 4.000, 1 of 2)")
    assert [row[-1] for row in steps.rows] == ["4.000", "0.250", "–", "–"]


def test_memory_is_beside_the_first_step() -> None:
    ways = {"eager": {"first_step_s": 1.25}, "convert": {"first_step_s": 10.0}}
    times = {"eager": 2.0, "convert": 1.0}
    memory = {"eager": 3 * 2**20, "convert": 2**20}
    found = measured("a", "pytorch_off", times, ways=ways, peak_bytes=memory)
    table = next(t for t in tables(report_data(found)) if "memory" in t.title)
    assert table.rows == [("a", "inference, channels_last, 1", "1.2", "10.0", "3", "1")]
    assert "share the CPU" not in table.note
    data = report_data(found)
    data["arguments"]["at_once"] = 7
    assert "; up to 7 such processes share the CPU." in tables(data)[2].note


def test_a_result_that_is_further_off_is_named() -> None:
    exact = {"outputs": torch.ones(4), "conv.weight": torch.ones(2, 2, 1, 1)}
    theirs = {name: tensor + 0.01 for name, tensor in exact.items()}
    ours = {"outputs": exact["outputs"] + 0.015, "conv.weight": exact["conv.weight"] * 1.1}
    result = measure.compared({"compile": theirs, "convert": ours}, exact)["ways"]
    assert result["compile"] == {"outputs": 0.01, "gradients": 0.01}
    assert result["convert"] == {
        "outputs": 0.015,
        "gradients": 0.1,
        "beyond": ["conv.weight"],
    }
    ours["outputs"] = exact["outputs"] * float("nan")
    result = measure.compared({"compile": theirs, "convert": ours}, exact)["ways"]
    assert result["convert"]["outputs"] is None
    assert result["convert"]["beyond"] == ["outputs", "conv.weight"]


@pytest.mark.parametrize("step", ["infer", "train"])
def test_a_subject_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Ways in one process, and processes, compute the same: no dropout, one seed; the images of
    an inference have passed every batch norm."""

    def create(name: str, device: str) -> nn.Module:
        norm = nn.BatchNorm2d(4)
        return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Dropout(0.5), nn.Flatten())

    monkeypatch.setattr(subjects, "create", create)
    case = Case("any", step, "channels_last")
    one, two = (Subject(case, 2, "cpu") for _ in range(2))
    assert one.inputs[0].is_contiguous(memory_format=torch.channels_last)
    norm = one.model[1]  # type: ignore[index]
    assert norm.momentum == nn.BatchNorm2d(4).momentum
    expected = one.reference(2)
    assert expected.keys() == ({"outputs", "0.weight"} if step == "train" else {"outputs"})
    mine = two.step(KNOWN["eager"], 2)
    for _ in range(2):  # gradients are not added up
        mine()
        for name, tensor in mine.results().items():
            torch.testing.assert_close(tensor, expected[name])
    outputs = expected["outputs"].view(2, 4, -1)
    torch.testing.assert_close(outputs.mean((0, 2)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs.var((0, 2)), torch.ones(4), atol=0.05, rtol=0)


def test_only_our_ways_have_our_layers() -> None:
    assert set(EVERYWHERE) <= set(KNOWN)
    subject = Subject(Case("any", "infer", "contiguous"), 2, "cpu")
    for name in ("eager", "compile", "compile_frozen", "convert", "compile_ours"):
        step = subject.step(KNOWN[name], 1)  # nothing is compiled before it runs
        convolutions = [m for m in step.model.modules() if isinstance(m, nn.Conv2d)]
        assert len(convolutions) == 2
        assert all(isinstance(m, ca.Conv2d) == KNOWN[name].is_ours for m in convolutions)
        assert all(m.sampling is None for m in convolutions if isinstance(m, ca.Conv2d))


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    ("name", "millions"),
    list(zip(NETWORKS, MILLIONS, strict=True)),
)
def test_networks_have_the_sizes_of_those_that_they_are_like(name: str, millions: float) -> None:
    """Parameters of Stable Diffusion 1.5's U-Net and VAE decoder, of YOLOv8-S, of the U-Net with
    batch norms, of ESRGAN's RRDBNet, of nnU-Net, of HiFi-GAN V1, and about those of the others."""
    with torch.device("meta"):
        model = KNOWN_NETWORKS[name][0]()
        outputs = model(*(torch.empty(1, *shape) for shape in MODELS[name].inputs))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=1e-3)
    shapes = [tuple(x.shape) for x in (outputs if isinstance(outputs, list) else [outputs])]
    assert (
        shapes
        == {
            "sd_unet": [(1, 4, 64, 64)],
            "sd_vae_decoder": [(1, 3, 512, 512)],
            "detector": [(1, 144, 80, 80), (1, 144, 40, 40), (1, 144, 20, 20)],
            "unet": [(1, 2, 320, 320)],
            "stylegan2": [(1, 3, 256, 256)],
            "esrgan": [(1, 3, 1024, 1024)],
            "video_decoder": [(1, 3, 17, 256, 256)],
            "wav2vec2": [(1, 499, 768)],
            "unet3d": [(1, 3, 128, 128, 128)],
            "hifigan": [(1, 1, 32768)],
            "conv_tasnet": [(1, 2, 64000)],
            "whisper_encoder": [(1, 1500, 384)],
        }[name]
    )


@pytest.mark.basic(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_all_their_steps(name: str) -> None:
    """A tiny one of each, of another batch than its inputs have."""
    for step in ("infer", "train"):
        (case,) = cases.cases([name], [step], ["channels_last"])
        if not case.batches(None):
            continue
        subject = Subject(case, 2, "cpu")
        assert [x.dim() for x in subject.inputs] == [1 + len(s) for s in MODELS[name].inputs]
        expected = subject.reference(1)
        assert (len(expected) > 10) == case.is_training, "gradients of all convolutions"
        for way in ("eager", "convert"):
            mine = subject.step(KNOWN[way], 1)
            mine()
            assert max(errors(mine.results(), expected).values()) < 1e-5


def is_free(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_the_gpu_is_lent_while_dynamo_compiles(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = GpuLock(str(path))
    seen: list[tuple[str, bool]] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        seen.append(("compiling", is_free(path)))

        def call(*given: Any) -> Any:
            seen.append(("running", is_free(path)))
            return graph(*given)

        return call

    lock.acquire()
    with lock.lent_while_compiling():
        torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
    torch.compile(lambda x: x + 2, backend=compiler)(torch.ones(2))
    assert seen == [
        *(("compiling", True), ("running", False)),
        *(("compiling", False), ("running", False)),
    ]
    lock.release()
    assert is_free(path)


def test_the_gpu_is_taken_back_while_groups_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not while Dynamo traces before, nor while Inductor compiles afterwards."""
    path = tmp_path / "lock"
    seen: list[tuple[str, bool]] = []

    def looking(name: str, function: Any) -> Any:
        def look(*args: Any, **more: Any) -> Any:
            seen.append((name, is_free(path)))
            return function(*args, **more)

        return look

    monkeypatch.setattr(programs, "find_groups", looking("find", programs.find_groups))
    monkeypatch.setattr(programs, "fuse_judged", groups.fuse_judged)
    inner = looking("compile", compile_fx.compile_fx_inner)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    judge = looking("judge", groups.never("it was asked for"))
    monkeypatch.setitem(groups.JUDGES, "always", lambda: judge)  # type: ignore[arg-type]
    lock = GpuLock(str(path))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()).eval()
    options = {"fuse": "always", "compare": False, "cpp.weight_prepack": False}
    x = torch.ones(1, 3, 8, 8)
    with lock.shared():
        with lock.lent_while_compiling(), torch.no_grad():
            torch.compile(model, backend="cudnn_autotune", options=options)(x)
        assert seen == [("find", True), *[("judge", False)] * 2, ("compile", True)]
        assert not is_free(path)
    assert is_free(path)


def test_waiting_for_the_gpu_is_not_the_first_steps(tmp_path: Path) -> None:
    one, two = (GpuLock(str(tmp_path / "lock")) for _ in range(2))
    one.acquire()
    threading.Timer(0.2, one.release).start()
    two.acquire()
    assert 0.1 < two.waited_s < 30
    assert one.waited_s < 0.1
    two.release()


def test_the_gpu_is_lent_while_engines_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not for engines that need no compiling, or are compiled already."""
    path = tmp_path / "lock"
    monkeypatch.setattr(GpuTimer, "_built", lambda timer, candidates: is_free(path))
    timer: Any = SimpleNamespace(plans={"known": None})
    with GpuLock(str(path)).shared():
        for text, is_compiled, expected in (
            ("new", True, True),
            ("known", True, False),
            ("new", False, False),
        ):
            candidate: Any = SimpleNamespace(text=text, is_compiled=is_compiled)
            assert GpuTimer._built(timer, [candidate]) is expected
            assert not is_free(path)
    assert GpuTimer._built(timer, [candidate]) is True, "what was replaced is back"
