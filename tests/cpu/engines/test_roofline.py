"""The roofline: what a convolution must move and compute, against counting one by one."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.fused_cases import FUNCTIONS
from support.conv.problems import make

import cudnn_autotune as ca
from cudnn_autotune.engines import roofline
from cudnn_autotune.engines.problem import DTYPES, OPERATIONS
from cudnn_autotune.engines.roofline import Limit, Peaks, Touched

PEAKS = Peaks(
    bytes_per_ms=4e9,
    flops_per_ms={
        "float16": 8e11,
        "bfloat16": 7e11,
        "tf32": 4e11,
        "float32": 5e10,
        "float64": 6e10,
    },
    launch_ms=0.002,
)


def random_problem(rng: random.Random) -> ca.ConvProblem:
    """A small problem of any kind, among them kernels of which parts meet the padding only."""
    while True:
        dims = rng.choice((1, 2, 2, 3))
        most = {1: 12, 2: 7, 3: 4}[dims]

        def each(low: int, high: int, dims: int = dims) -> tuple[int, ...]:
            return tuple(rng.randint(low, high) for _ in range(dims))

        groups = rng.choice((1, 1, 2, 3))
        depth, filters = rng.choice((1, 2)), groups * rng.choice((1, 2))
        op = rng.choice(OPERATIONS)
        fused = op == "fprop" and rng.random() < 0.5
        last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(dims)
        try:
            return ca.ConvProblem(
                op,
                (rng.choice((1, 2)), depth * groups, *each(1, most)),
                (filters, depth, *each(1, 4)),
                stride=each(1, 4),
                padding=(*each(0, 4), *each(0, 4)),
                dilation=each(1, 3),
                groups=groups,
                dtype=rng.choice(list(DTYPES)),
                memory_format=rng.choice(
                    (torch.contiguous_format, last or torch.contiguous_format)
                ),
                bias=fused and rng.random() < 0.5,
                residual=fused and rng.random() < 0.5,
                activation=rng.choice(tuple(FUNCTIONS)) if fused else "",
            )
        except ValueError:  # the kernel does not fit
            continue


def counted(problem: ca.ConvProblem) -> Touched:
    """One by one: each output, each tap, each channel."""
    n = problem.spatial_dims
    inputs, weights, outputs, products = set(), set(), set(), 0
    filters, depth, *taps = problem.weight_shape
    per_group = filters // problem.groups
    for image, k, *place in itertools.product(*map(range, problem.output_shape)):
        for c, *tap in itertools.product(range(depth), *map(range, taps)):
            at = [
                place[d] * problem.stride[d] + tap[d] * problem.dilation[d] - problem.padding[d]
                for d in range(n)
            ]
            if all(0 <= at[d] < problem.input_shape[2 + d] for d in range(n)):
                inputs.add((image, k // per_group * depth + c, *at))
                weights.add((k, c, *tap))
                outputs.add((image, k, *place))
                products += 1
    return Touched(len(inputs), len(weights), len(outputs), products)


def test_what_is_touched_is_counted() -> None:
    rng = random.Random(0)
    partial = dict.fromkeys(("inputs", "weights", "outputs", "products"), 0)
    for _ in range(300):
        problem = random_problem(rng)
        found = roofline.touched(problem)
        assert found == counted(problem), problem
        partial["inputs"] += found.inputs < math.prod(problem.input_shape)
        partial["weights"] += found.weights < math.prod(problem.weight_shape)
        partial["outputs"] += found.outputs < math.prod(problem.output_shape)
        partial["products"] += 2 * found.products < problem.flops
    assert min(partial.values()) > 20, "the problems are not of all kinds"


def test_what_moves_is_what_the_operation_reads_and_its_whole_result() -> None:
    rng = random.Random(1)
    for _ in range(300):
        problem = random_problem(rng)
        need = counted(problem)
        x, w, y = map(math.prod, (problem.input_shape, problem.weight_shape, problem.output_shape))
        elements = {
            "fprop": need.inputs + need.weights + y,
            "dgrad": need.outputs + need.weights + x,
            "wgrad": need.outputs + need.inputs + w,
        }[problem.op]
        elements += problem.weight_shape[0] * problem.bias + y * problem.residual
        assert roofline.bytes_moved(problem) == elements * problem.dtype.itemsize
        assert roofline.operations(problem) == 2 * need.products


@pytest.mark.parametrize("op", OPERATIONS)
def test_without_padding_every_product_counts(op: str) -> None:
    problem = make("forum_fp32_nchw", op)
    assert roofline.operations(problem) == problem.flops
    padded = make("resnet_fp16_nhwc", op)
    inside = (56 * 3 - 2) / (56 * 3)
    assert roofline.operations(padded) == pytest.approx(padded.flops * inside**2, rel=1e-12)


def test_what_binds() -> None:
    def of(shape: tuple[int, ...], weight: tuple[int, ...], **given: Any) -> Limit:
        problem = ca.ConvProblem("fprop", shape, weight, dtype=torch.float16, **given)
        found = roofline.limit(problem, PEAKS)
        expected = {
            "memory": roofline.bytes_moved(problem) / PEAKS.bytes_per_ms,
            "compute": roofline.operations(problem) / PEAKS.flops_per_ms["float16"],
            "launch": PEAKS.launch_ms,
        }
        assert found.limit_ms == expected[found.bound_by] == max(expected.values())
        return found

    assert of((64, 512, 28, 28), (512, 512, 3, 3), padding=1).bound_by == "compute"
    assert of((64, 64, 56, 56), (64, 64, 1, 1)).bound_by == "memory"
    assert of((1, 16, 7, 7), (16, 16, 1, 1)).bound_by == "launch"
    # 7x7: a direct convolution without tensor cores could not reach this.
    depthwise = of((64, 96, 56, 56), (96, 1, 7, 7), padding=3, groups=96)
    assert depthwise.bound_by == "memory"
    assert depthwise.limit_ms == pytest.approx(2 * 2 * 64 * 96 * 56 * 56 / 4e9, rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "allow_tf32", "lacking", "rate"),
    [
        (torch.float16, True, (), 8e11),
        (torch.bfloat16, True, (), 7e11),
        (torch.float32, True, (), 4e11),
        # Units for float64 represent float32 exactly, and are faster on this GPU.
        (torch.float32, False, (), 6e10),
        (torch.float64, True, (), 6e10),
        # A GPU without the tensor cores for a type computes it by wider units.
        (torch.bfloat16, True, ("bfloat16",), 4e11),
        (torch.bfloat16, True, ("bfloat16", "tf32"), 6e10),
        (torch.float32, True, ("tf32", "float32"), 6e10),
    ],
)
def test_the_fastest_unit_that_can_compute_a_type(
    dtype: torch.dtype, allow_tf32: bool, lacking: tuple[str, ...], rate: float
) -> None:
    problem = make("grouped_fp16", dtype=dtype, allow_tf32=allow_tf32)
    there = {name: f for name, f in PEAKS.flops_per_ms.items() if name not in lacking}
    assert replace(PEAKS, flops_per_ms=there).rate_of(problem) == rate


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bytes_per_ms": 0.0}, "bytes_per_ms: must be above 0"),
        ({"bytes_per_ms": math.nan}, "bytes_per_ms: must be above 0"),
        ({"launch_ms": -1.0}, "launch_ms: must be above 0"),
        ({"launch_ms": math.inf}, "launch_ms: must be above 0"),
        ({"flops_per_ms": {"float64": 0.0}}, "flops_per_ms.float64: must be above 0"),
        ({"flops_per_ms": {"float64": 1.0, "int8": 1.0}}, "must be of float16, bfloat16, tf32"),
        ({"flops_per_ms": {"float16": 1.0}}, "float64 is missing"),
    ],
)
def test_peaks_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PEAKS, **changes)
