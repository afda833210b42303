"""The kernel of ``norm_pointwise`` on the emulation of CUDA, and its plans."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from cuda_emulation import WHY_NOT, launch_kernel
from cuda_emulation.checks import H200, are_bands_whole, between_bands
from pointwise_cases import Pointwise, case
from references import TOLERANCES, relative_error
from torch import Tensor

from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.norms.pointwise import norm_pointwise, reference
from cudnn_autotune.engines.norms.pointwise_plan import PointwisePlan, PointwiseProblem, plans
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.recipe import Address, Int64, KernelLaunch
from cudnn_autotune.engines.weights.operators import (
    BIAS,
    MEAN,
    SCALE,
    SHIFT,
    VARIANCE,
)

emulated = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SMALL = replace(H200, multiprocessors=2)
"""So small a GPU that a block goes over several tiles."""


def problem_of(given: Pointwise) -> PointwiseProblem:
    n, c, h, w = given.input.shape
    return PointwiseProblem(
        *(given.input.dtype, given.vectors[0].dtype, n * h * w, c, given.weight.shape[0]),
        *(given.bias is not None, given.residual is not None, given.activation),
    )


def run(plan: PointwisePlan, given: Pointwise, *, is_reversed: bool = False) -> Tensor:
    """Runs a plan on tensors between guard bands, and returns the output.

    The input stays a slice, in a tensor full of NaN."""
    n, c, h, w = given.input.shape
    k = given.weight.shape[0]
    last, plain = torch.channels_last, torch.contiguous_format
    bits = iter(given.vectors)
    named: dict[str, Tensor | None] = {
        "in": given.input,
        "w": between_bands(given.weight, plain),
        "out": between_bands(torch.full((n, k, h, w), math.nan, dtype=given.input.dtype), last),
        "bias": None if given.bias is None else between_bands(given.bias, plain),
        "residual": None if given.residual is None else between_bands(given.residual, last),
    }
    for bit in (SCALE, VARIANCE, MEAN, BIAS, SHIFT):
        named[str(bit)] = between_bands(next(bits), plain) if given.given & bit else None
    buffers = {name: tensor for name, tensor in named.items() if tensor is not None}
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    arguments = [
        Int64(0) if tensor is None else Address(name)  # type: ignore[arg-type]
        for name, tensor in named.items()
    ]
    launch = KernelLaunch(
        plan.kernel(),
        plan.grid(SMALL),
        (plan.threads, 1, 1),
        (*arguments, given.eps, c, given.input.stride(3), k, n * h * w, plan.tiles),
        plan.shared_bytes,
    )
    launch_kernel(launch, buffers, is_reversed=is_reversed)
    for name, tensor in buffers.items():
        if name != "out":
            is_same = torch.allclose(tensor, before[name], rtol=0, atol=0, equal_nan=True)
            assert is_same, f"it writes {name}"
        if name != "in":
            assert are_bands_whole(tensor), f"it writes outside of {name}"
    return buffers["out"]


def plan_of(given: Pointwise, settings: tuple[int, int, int, bool, int]) -> PointwisePlan:
    return PointwisePlan(problem_of(given), *settings)


@emulated
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        # warpgroups, m_tiles, n_tile, keeps_filters, stages; N, C, H, W, K, channels of the whole
        ((1, 1, 16, False, 3), (1, 64, 5, 7, 16, 64)),
        ((1, 1, 24, True, 3), (3, 72, 9, 11, 48, 96)),
        ((2, 1, 32, True, 4), (2, 200, 13, 17, 32, 256)),
        ((2, 2, 64, False, 4), (2, 40, 17, 19, 64, 40)),
        ((1, 2, 8, False, 3), (1, 8, 1, 1, 8, 16)),
        ((2, 1, 128, True, 4), (5, 136, 9, 9, 128, 160)),
    ],
    ids=str,
)
def test_it_is_as_near_to_float64_as_the_unfused_form(
    settings: tuple[int, int, int, bool, int], sizes: tuple[int, ...], is_reversed: bool
) -> None:
    given = case(*sizes)
    found = run(plan_of(given, settings), given, is_reversed=is_reversed)
    assert relative_error(found, given.expected()) <= TOLERANCES[torch.float16]


@emulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vectors", [torch.float32, None], ids=str)
@pytest.mark.parametrize(
    ("given", "adds", "activation"),
    [
        (SCALE | VARIANCE | MEAN | SHIFT, "bias", "relu"),
        (SCALE | VARIANCE | MEAN | BIAS | SHIFT, "residual", ""),
        (SCALE | SHIFT, "bias and residual", "leaky_relu(0.1)"),
        (MEAN, "", "silu"),
        (VARIANCE, "bias", ""),
    ],
)
def test_epilogues_and_vectors(
    dtype: torch.dtype, vectors: torch.dtype | None, given: int, adds: str, activation: str
) -> None:
    made = case(
        *(1, 48, 7, 11, 32, 64),
        dtype=dtype,
        vectors=vectors or dtype,
        given=given,
        adds=adds,
        activation=activation,
    )
    found = run(plan_of(made, (1, 1, 32, False, 3)), made)
    assert relative_error(found, made.expected()) <= TOLERANCES[dtype]
    by_pytorch = reference(*made.all)
    assert by_pytorch.is_contiguous(memory_format=torch.channels_last)
    assert relative_error(by_pytorch, made.expected()) <= TOLERANCES[dtype]


@emulated
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_nan_and_infinity_go_where_they_go_in_pytorch(dtype: torch.dtype) -> None:
    made = case(1, 24, 5, 5, 16, 32, dtype=dtype)
    made.input[0, 3, 1, 1] = math.nan
    made.input[0, 5, 2, 2] = math.inf
    made.input[0, 5, 3, 3] = -math.inf
    scale, _, mean, _ = made.vectors
    scale[5] = scale[5].abs() + 0.5
    mean[7] = math.inf
    found = run(plan_of(made, (1, 1, 16, False, 3)), made).double()
    expected = made.expected()
    for where in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(where(found), where(expected))
    finite = expected.isfinite()
    assert 0 < finite.sum() < finite.numel()
    assert relative_error(found[finite], expected[finite]) <= TOLERANCES[dtype]


def test_a_norm_that_is_far_from_zero_keeps_its_digits() -> None:
    """Of a mean of a hundred deviations, ``x * s + shift`` loses two digits of float32's seven."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    made = case(1, 64, 8, 8, 16, 64, given=SCALE | VARIANCE | MEAN | SHIFT)
    made.vectors[2].add_(100)
    made.input.add_(100)
    found = run(plan_of(made, (1, 1, 16, False, 3)), made)
    assert relative_error(found, made.expected()) <= TOLERANCES[torch.float16]


@pytest.mark.skipif(not extension_available(), reason="the extension was built without CUDA")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_nvrtc_compiles_the_first_plan(dtype: torch.dtype) -> None:
    problem = PointwiseProblem(dtype, dtype, 64 * 56 * 56, 128, 128, True, False, "relu")
    assert cubin(plans(problem, H200)[0].kernel(), (9, 0))


@pytest.mark.parametrize("pixels", [1, 49, 64 * 14 * 14, 64 * 56 * 56])
@pytest.mark.parametrize("channels", [8, 64, 992, 4096])
@pytest.mark.parametrize("out_channels", [8, 24, 128, 512, 520])
def test_plans_fit_the_gpu(pixels: int, channels: int, out_channels: int) -> None:
    problem = PointwiseProblem(
        torch.float16, torch.float32, pixels, channels, out_channels, False, False, ""
    )
    found = plans(problem, H200)
    assert 1 <= len(found) <= 3
    for plan in found:
        blocks, slices, _ = plan.grid(H200)
        assert slices * plan.n_tile == out_channels
        assert 1 <= blocks <= plan.tiles
        assert plan.tiles * plan.rows >= pixels
        assert plan.shared_bytes <= H200.shared_bytes


def test_there_are_no_plans_for_what_the_kernel_does_not_compute() -> None:
    served = PointwiseProblem(torch.float16, torch.float16, 49, 64, 64, False, False, "")
    assert plans(served, H200)
    assert not plans(served, gpu_of("a100"))
    assert not plans(replace(served, dtype=torch.float32), H200)
    assert not plans(replace(served, vectors=torch.bfloat16), H200)
    assert not plans(replace(served, channels=60), H200)
    assert not plans(replace(served, out_channels=60), H200)


def test_the_operator() -> None:
    given = case(2, 24, 5, 7, 16, 32)
    torch.library.opcheck(norm_pointwise, given.all, test_utils=("test_schema", "test_faketensor"))


def test_it_refuses_what_does_not_fit() -> None:
    given = case(2, 24, 5, 7, 16, 32)
    input, weight, *_, vectors, bits, eps, activation, plan, sampling, limit = given.all
    rest = (None, None, vectors, bits, eps, activation, plan, sampling, limit)
    message = re.escape("expected (N, C, H, W) and (K, C, 1, 1), got (2, 24, 5, 7) and (16, 24, 3,")
    with pytest.raises(ValueError, match=message):
        norm_pointwise(input, weight.expand(16, 24, 3, 3), *rest)
    with pytest.raises(ValueError, match="weight: expected the 24 channels of the input, got 16"):
        norm_pointwise(input, weight[:, :16], *rest)
    with pytest.raises(ValueError, match="vectors: expected one for each bit of given = 1, got 4"):
        norm_pointwise(input, weight, None, None, vectors, SCALE, eps, activation, 0, "", -1)
    short = [vector[:8] for vector in vectors]
    message = re.escape("vectors: expected shape (24,), the channels of the input, got (8,)")
    with pytest.raises(ValueError, match=message):
        norm_pointwise(input, weight, None, None, short, bits, eps, activation, 0, "", -1)
