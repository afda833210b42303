"""The measured peaks of a GPU: plausible, alike from time to time, and limits that hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.store.stored import run

import cudnn_autotune as ca
from cudnn_autotune.engines import roofline
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import peaks_file
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.timers import peaks
from cudnn_autotune.timers.measuring import cold_sets, operands

pytestmark = pytest.mark.alone

# NVIDIA's data sheets, dense: bytes and floating-point operations a millisecond. float64 is that of
# tensor cores where there are some, and float16 accumulates in float32.
_HOPPER = {"float16": 989e9, "bfloat16": 989e9, "tf32": 494e9, "float32": 67e9, "float64": 67e9}
_AMPERE = {"float16": 312e9, "bfloat16": 312e9, "tf32": 156e9, "float32": 19.5e9, "float64": 19.5e9}
NOMINAL = {
    "NVIDIA H200": (4.8e9, _HOPPER),
    "NVIDIA H100 80GB HBM3": (3.35e9, _HOPPER),
    "NVIDIA A100-SXM4-80GB": (2.039e9, _AMPERE),
    "NVIDIA A100-SXM4-40GB": (1.555e9, _AMPERE),
    "NVIDIA L4": (
        0.3e9,
        {"float16": 121e9, "bfloat16": 121e9, "tf32": 60e9, "float32": 30.3e9, "float64": 0.47e9},
    ),
    "Tesla T4": (0.32e9, {"float16": 65e9, "float32": 8.1e9, "float64": 0.25e9}),
}


@pytest.fixture(scope="module")
def measured() -> Peaks:
    return peaks.measure()


def test_they_are_plausible(measured: Peaks) -> None:
    name = torch.cuda.get_device_name()
    if name not in NOMINAL:
        pytest.skip(f"the data sheet of {name} is not in this file")
    bandwidth, rates = NOMINAL[name]
    assert 0.5 < measured.bytes_per_ms / bandwidth < 1.05
    assert measured.flops_per_ms.keys() == rates.keys()
    for arithmetic, rate in measured.flops_per_ms.items():
        assert 0.3 < rate / rates[arithmetic] < 1.05, arithmetic


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("input_shape", "weight_shape", "padding", "groups"),
    [
        ((64, 256, 56, 56), (64, 256, 1, 1), 0, 1),
        ((64, 512, 28, 28), (512, 512, 3, 3), 1, 1),
        ((64, 96, 112, 112), (96, 1, 3, 3), 1, 96),
        ((1, 16, 7, 7), (16, 16, 1, 1), 0, 1),
    ],
)
def test_no_call_beats_the_limit(
    measured: Peaks,
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    padding: int,
    groups: int,
    dtype: torch.dtype,
    allow_tf32: bool,
    cudnn_flags: object,
) -> None:
    """PyTorch's own, from a cold cache. float32 without TF32 may use Winograd's algorithm, which
    multiplies 2.25 times less for a 3x3 kernel and tiles of 2x2, and 4 times less for 4x4."""
    cudnn_flags(allow_tf32=allow_tf32)  # type: ignore[operator]
    problem = ca.ConvProblem(
        "fprop",
        input_shape,
        weight_shape,
        padding=padding,
        groups=groups,
        dtype=dtype,
        allow_tf32=allow_tf32,
        memory_format=torch.channels_last,
    )
    sets = cold_sets(problem, operands(problem), most=64)

    def calls() -> None:
        for x, w, *_ in sets:
            F.conv2d(x, w, padding=padding, groups=groups)

    time_ms = peaks._least_ms(calls) / len(sets)
    found = roofline.limit(problem, measured)
    is_winograd = found.bound_by == "compute" and dtype == torch.float32 and not allow_tf32
    assert found.times(time_ms) > (0.2 if is_winograd else 0.9)


def test_the_command_measures_keeps_and_shows(tmp_path: Path) -> None:
    ca.set_store(mode="read_write")
    told = json.loads(run("env", "--store", tmp_path, "--measure", "--json").stdout)["peaks"]
    found = peaks_file.find(tmp_path, Environment.of())
    assert told["memory, GB/s"] == pytest.approx(found.peaks.bytes_per_ms / 1e6, rel=1e-3)
    again = json.loads(run("env", "--store", tmp_path, "--json").stdout)["peaks"]
    assert again == told


def test_a_choice_knows_its_limit(tmp_path: Path, measured: Peaks) -> None:
    ca.set_store(tmp_path, mode="read_write")
    ca.set_sampling("race")
    problem_input = torch.randn(16, 64, 56, 56, device="cuda", dtype=torch.float16)
    layer = ca.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        layer(problem_input)
    (made,) = ca.choices()
    assert made.limit is None
    peaks_file.keep(tmp_path, Environment.of(), measured)
    assert made.limit == roofline.limit(made.problem, measured_on_disk(tmp_path))
    assert made.times_limit > 0.3  # half of the race's calls find a warm cache


def measured_on_disk(place: Path) -> Peaks:
    found = peaks_file.find(place, Environment.of())
    return found.peaks
