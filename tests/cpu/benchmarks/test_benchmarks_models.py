"""models.py: a dry run on the CPU, and how its figures are made."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from models import cases, inductor_layout, measure
from models import subject as subjects
from models.cases import DECODERS, MODELS, Case
from models.cases import WAYS as KNOWN
from models.gpu_lock import GpuLock
from models.networks import NETWORKS as KNOWN_NETWORKS
from models.report import has_points, rows, tables
from models.subject import Subject, errors
from models.turns import take_turns
from support.processes.benchmark_scripts import (
    assert_rendered,
    record,
    whole_record,
)
from torch import nn
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx

import cudnn_autotune as ca

SCRIPT = "models"
SHORT = "--batches 2 --rounds 4 --block-ms 1 --settle-s 0"
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
    *("encodec", "dac_decoder", "demucs", "melgan", "bigvgan", "parallel_wavegan"),
    *("nnunet3d", "vnet", "rife", "ddpm_unet", "resnet50_fpn"),
)
MILLIONS = (
    *(859.521, 49.489, 11.167, 31.038, 27.933, 16.698),
    *(31.194, 63.240),
    *(13.926, 5.051, 8.205, 94.343),
    *(6.447, 54.104, 22.331, 4.266, 6.449, 1.302),
    *(16.547, 6.929, 6.820, 66.425, 26.799),
)


def needs(name: str) -> None:
    """Skips the test of a network that torchvision's parts make, where that is not installed."""
    if name == "resnet50_fpn":
        pytest.importorskip("torchvision.models")


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


@pytest.fixture
def request_for(tmp_path: Path) -> dict[str, Any]:
    """What a worker is asked: eager steps of a miniature, in two batches."""
    case = {"model": "any", "step": "infer", "layout": "contiguous"}
    asked = {"case": case, "batches": [1, 2], "ways": ["eager", "convert"], "device": "cpu"}
    asked |= {"limit_s": 1000.0, "way_limit": 900.0, "turns_s": 15.0, "dtype": "float16"}
    asked |= {"pytorch": "pytorch_off", "sampling": "race", "store": str(tmp_path)}
    asked["compiles_anew"] = True
    return asked | {
        "lock": str(tmp_path / "lock"),
        "rounds": 2,
        "block_ms": 0.01,
        "settle_s": 0,
    }


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
    names = [name for name, way in KNOWN.items() if way.compile is not None and not way.mends]
    for ways, batches in ((names, [2, 1]), (names[::-1], [1])):
        parts = list(measure.measure(request_for | {"ways": ways, "batches": batches}))
        assert not [part for part in parts if part["part"] == "failed"]
        graphs = [(p["batch"], p["way"], p["graphs"]) for p in parts if p["part"] == "way"]
        assert graphs == [(batch, name, 1) for batch in batches for name in ways]
        # The first is the convolution that loads the compiler.
        assert frozen == [False, *[KNOWN[name].freezing for name in ways] * len(batches)]
        frozen.clear()


@pytest.mark.parametrize("compiles_anew", [True, False])
def test_a_first_step_with_programs_of_a_run_before_is_not_recorded(
    request_for: dict[str, Any], compiles_anew: bool
) -> None:
    asked = {"batches": [1], "ways": ["eager"], "compiles_anew": compiles_anew}
    [way] = [p for p in measure.measure(request_for | asked) if p["part"] == "way"]
    assert ("first_step_s" in way) == compiles_anew


def backward_graph(channels: int, groups: int) -> Any:
    """The gradients of a convolution, on a device of which Inductor knows nothing."""
    how = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups, [True, True, False])
    x = torch.empty(8, channels, 14, 14, device="meta")
    weight = torch.empty(channels, channels // groups, 3, 3, device="meta")
    backward = torch.ops.aten.convolution_backward.default
    return make_fx(lambda *tensors: backward(*tensors, *how), tracing_mode="fake")(x, x, weight)


@pytest.mark.parametrize(
    ("channels", "groups", "is_laid_out"),
    [(128, 1, True), (128, 128, True), (128, 4, False), (32, 1, False)],
)
def test_mended_inductor_lays_out_a_backward_as_its_forward(
    channels: int, groups: int, is_laid_out: bool
) -> None:
    """Its own rules leave alone grouped convolutions that are not depthwise, and small ones."""
    graph = backward_graph(channels, groups)
    code = graph.code
    as_it_is = GraphLowering.decide_layout_opt(graph, is_inference=False)
    with inductor_layout.mended():
        assert GraphLowering.decide_layout_opt(graph, is_inference=False) == is_laid_out
    assert GraphLowering.decide_layout_opt(graph, is_inference=False) == as_it_is
    graph.recompile()
    assert graph.code == code
    if not inductor_layout.nothing_to_mend():
        assert not as_it_is


@pytest.mark.slow
def test_a_fault_that_torch_does_not_have_is_told(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ["eager", "compile", "compile_mended"]
    case = {**request_for["case"], "step": "train"}
    request = request_for | {"case": case, "batches": [2], "ways": ways}
    for reason in ("", "this torch has no such fault"):
        monkeypatch.setattr(inductor_layout, "nothing_to_mend", lambda text=reason: text)
        parts = {part["part"]: part for part in measure.measure(request)}
        assert "failed" not in parts
        if reason:
            assert parts["left_out"] == {
                **{"batch": 2, "part": "left_out"},
                **{"way": "compile_mended", "reason": reason},
            }
        assert list(parts["turns"]["times_ms"]) == (ways[:2] if reason else ways)


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


def measured_decoder(name: str, request: dict[str, Any], *ways: str) -> dict[str, Any]:
    """The measurements of a tiny autoencoder, by part; none may fail."""
    pytest.importorskip("diffusers")
    case = {**request["case"], "model": name}
    asked = request | {"case": case, "batches": [1], "ways": list(ways)}
    parts = list(measure.measure(asked))
    assert [part["part"] for part in parts] == ["way"] * len(ways) + ["turns", "compared"]
    assert list(parts[-2]["times_ms"]) == list(ways)
    for way in parts[-1]["ways"].values():
        assert way["outputs"] < 1e-5
        assert not way.get("beyond")
    return parts[0]


EAGER = ("eager", "eager_last", "convert", "convert_last")


@pytest.mark.parametrize(
    "name",
    [
        "qwen_encode_tiled",
        *(pytest.param(n, marks=pytest.mark.slow) for n in DECODERS if n != "qwen_encode_tiled"),
    ],
)
def test_decoders_and_encoders_in_eager_ways(name: str, request_for: dict[str, Any]) -> None:
    measured_decoder(name, request_for, *EAGER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        *(("sd_decode", 1), ("sd_decode_tiled", 4), ("flux_encode", 1), ("qwen_decode", 1)),
        *(("wan_decode", 3), ("ltx_decode", 1), ("cogvideox_decode", 2), ("hunyuan_encode", 1)),
    ],
)
def test_decoders_are_compiled_for_each_size_of_a_tile_and_state_of_a_cache(
    name: str, graphs: int, request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, *_, **__: graph.forward)
    way = "backend_last" if name.startswith("wan") else "compile"
    assert measured_decoder(name, request_for, way)["graphs"] == graphs


def test_a_way_has_its_own_limit_of_time(
    request_for: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ca, "convert", lambda *_, **__: time.sleep(60))
    parts = list(measure.measure(request_for | {"batches": [2], "way_limit": 1.0}))
    assert [part["part"] for part in parts] == ["way", "failed", "turns", "compared"]
    assert parts[1]["error"] == "no time was left for it"


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


def measured(model: str, pytorch: str, times: dict[str, float], **more: Any) -> dict[str, Any]:
    """The entries of one process in a record."""
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


def test_a_later_process_takes_the_place_of_one_with_no_more_ways() -> None:
    """Not of one by another of PyTorch's modes, nor of one that measured another way."""
    earlier = {"eager": 4.0, "compile": 3.0, "backend": 2.0}
    runs = [
        measured("a", "pytorch_on_10", earlier),
        measured("a", "pytorch_off", {"eager": 8.0, "compile": 6.0}),
        measured("a", "pytorch_on_10", {"eager": 2.0, "compile": 2.0, "backend": 1.0}),
    ]
    (row,) = rows(report_data(*runs))
    assert row.ours == {"backend": 1.0}
    assert row.pytorch()["compile", "pytorch_on_10"] == 2.0
    (row,) = rows(report_data(runs[0], measured("a", "pytorch_on_10", {"eager": 2.0})))
    assert row.ours == {"backend": 2.0}


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
    contiguous = measured("a", "pytorch_on_10", {"eager": 6.0, "convert": 2.0})
    data["results"]["runs"].append(contiguous | {"layout": "contiguous"})
    means = {row[0]: row[1][:5] for row in tables(data)[0].rows}
    assert means["inference, channels_last: 4"] == "1.000"
    assert means["inference, contiguous: 1"] == "3.000"


def test_first_steps_and_memory_of_training_are_told_as_ratios() -> None:
    """Ratios divide a step's memory by that of PyTorch's fastest."""
    ways = {"compile": {"first_step_s": 10.0}, "backend": {"first_step_s": 15.0}}
    peaks = {"eager": 100, "compile": 200, "compile_max": 400, "convert": 50, "backend": 300}
    times = dict(eager=9.0, compile=4.0, compile_max=3.0, convert=2.0, backend=1.5)
    run = measured("a", "pytorch_on_10", times, ways=ways, peak_bytes=peaks)
    left_out = {"compile_mended": "torch 0.0 has no fault"}
    train = run | {"step": "train", "left_out": left_out}
    quick = train | {"model": "b", "ways": ways | {"backend": {"first_step_s": 5.0}}}
    shown = {table.title: table for table in tables(report_data(run, train, quick))}
    table = shown["Training: ours over PyTorch's, the first step and the memory"]
    assert table.columns[2:] == [
        "backend / compile: first step",
        "convert / eager: memory",
        "backend / best torch.compile: memory",
    ]
    assert [row[2:] for row in table.rows] == [
        ("1.500", "0.500", "0.750"),
        ("0.500", "0.500", "0.750"),
        ("1.000 (1.500)", "0.500 (0.500)", "0.750 (0.750)"),
    ]
    assert shown["Steps (ms)"].note.endswith("compile, mended: torch 0.0 has no fault.")
    assert len(tables(report_data(run))) == len(shown) - 1, "inference has none"


def test_the_longest_kernels_of_each_way_are_shown() -> None:
    kernels = {
        "backend": {"launches": 3, "ms": 1.5, "longest": [["a_kernel", 2, 1.0], ["b", 1, 0.5]]}
    }
    run = measured("a", "pytorch_on_10", {"compile": 2.0, "backend": 1.0}, kernels=kernels)
    shown = {table.title: table for table in tables(report_data(run))}
    (row,) = shown["Longest kernels of a step"].rows
    assert row[2:] == ("backend", "3", "1.500", "a_kernel 2, 1.000; b 1, 0.500")


def test_a_record_without_a_ratio_has_no_plot() -> None:
    ours = measured("a", "pytorch_on_10", {"backend": 1.0})
    assert not has_points(report_data(ours))
    both = measured("a", "pytorch_on_10", {"compile": 2.0, "backend": 1.0})
    assert has_points(report_data(ours, both))


def test_another_backend_of_the_compiler_is_a_rival() -> None:
    """A ratio of one of ours is over the fastest of the rivals."""
    ours = {name for name, way in KNOWN.items() if way.is_ours}
    assert ours == {name for name in KNOWN if name.startswith(("convert", "fuse", "backend"))} | {
        "compile_ours"
    }
    assert not cases.Way("a rival", compile={"backend": "tensorrt"}).is_ours
    assert not cases.Way("a rival", prepare="tensorrt").is_ours


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


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    ("name", "millions"),
    list(zip(NETWORKS, MILLIONS, strict=True)),
)
def test_networks_have_the_sizes_of_those_that_they_are_like(name: str, millions: float) -> None:
    """Parameters of Stable Diffusion 1.5's U-Net and VAE decoder, of YOLOv8-S, of the U-Net with
    batch norms, of ESRGAN's RRDBNet, of nnU-Net, of HiFi-GAN V1, of MelGAN, and about those of the
    others, of which some are reduced."""
    needs(name)
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
            "encodec": [(1, 1, 48000)],
            "dac_decoder": [(1, 1, 44032)],
            "demucs": [(1, 8, 175444)],
            "melgan": [(1, 1, 51200)],
            "bigvgan": [(1, 1, 25600)],
            "parallel_wavegan": [(1, 1, 24000)],
            "nnunet3d": [(1, 4, 128, 128, 128)],
            "vnet": [(1, 2, 64, 128, 128)],
            "rife": [(1, 3, 640, 1280)],
            "ddpm_unet": [(1, 4, 64, 64)],
            "resnet50_fpn": [(1, 256, side, side) for side in (200, 100, 50, 25, 13)],
        }[name]
    )


@pytest.mark.basic(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_take_all_their_steps(name: str) -> None:
    """A tiny one of each, of another batch than its inputs have."""
    needs(name)
    for step in ("infer", "train"):
        (case,) = cases.cases([name], [step], ["channels_last"])
        if not case.batches(None):
            continue
        subject = Subject(case, 2, "cpu")
        assert [x.dim() for x in subject.inputs] == [1 + len(s) for s in MODELS[name].inputs]
        expected = subject.reference(1)
        assert (len(expected) > 8) == case.is_training, "gradients of all convolutions"
        for way in ("eager", "convert"):
            mine = subject.step(KNOWN[way], 1)
            mine()
            assert max(errors(mine.results(), expected).values()) < 1e-5


def test_errors_are_relative_but_to_gradients_near_zero() -> None:
    given = {"outputs": (4.0, 4.04), "first": (2.0, 2.02), "zero": (1e-20, 1e-9)}
    expected, found = ({name: torch.tensor([p[i]]) for name, p in given.items()} for i in (0, 1))
    least = 2 * torch.finfo(torch.float32).eps
    assert errors(found, expected) == pytest.approx(
        {"outputs": 0.01, "first": 0.01, "zero": 1e-9 / least}, rel=1e-4
    )
    found["zero"].fill_(torch.nan)
    assert errors(found, expected)["zero"] != errors(found, expected)["zero"]


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
