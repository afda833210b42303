"""The kernels of group norms, on the emulation of CUDA, against PyTorch in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import cuda_emulation
from support.conv.references import assert_close, relative_error
from support.norms.cases import EPS
from support.norms.launches import (
    SMALL,
    TOLERANCES,
    Schedule,
    group_norm_by_kernels,
    group_norm_in_channels_last,
)
from torch import Tensor

from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.norms.plan import (
    FORMS,
    Form,
    NormProblem,
    distinct_plans,
    unsupported_by_kernels,
)

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)


def compare(
    shape: tuple[int, ...],
    groups: int,
    form: Form,
    dtype: torch.dtype = torch.float32,
    *,
    affine: bool = True,
    offset: float = 1.0,
    gpu: Any = SMALL,
    seed: int = 0,
    **options: Any,
) -> None:
    """Asserts that the kernels' results are those of PyTorch in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random_of(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    input = (2 * random_of(*shape) + offset).to(dtype)
    weight, bias = (random_of(shape[1]) if affine else None for _ in range(2))
    found = group_norm_by_kernels(input, groups, weight, bias, gpu, form, **options)
    wide = [None if one is None else one.double() for one in (weight, bias)]
    output = F.group_norm(input.double(), groups, *wide, eps=EPS)
    var, mean = torch.var_mean(input.double().view(shape[0], groups, -1), -1, correction=0)
    expected = output, mean, torch.rsqrt(var + EPS)
    tolerance = TOLERANCES[dtype]
    assert_close(found[0], expected[0], tolerance, "output")
    assert_close(found[1], expected[1], 3e-6, "mean")
    assert_close(found[2], expected[2], 3e-6, "inverse deviation")


SHAPES = {
    "all channels are one group": ((2, 16, 40), 1),
    "a channel is a group": ((2, 6, 8, 8), 6),
    "vectors reach over the end of a channel": ((3, 8, 37), 2),
    "channels shorter than a vector": ((3, 16, 3), 2),
    "channels of one number": ((5, 24), 3),
    "an odd number of a group": ((3, 9, 5, 5), 3),
    "one number": ((2, 5), 5),
    "3-d": ((2, 12, 3, 4, 5), 4),
    "large": ((1, 8, 64, 64), 2),
}


@pytest.mark.basic(12)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_shapes(form: Form, name: str, dtype: torch.dtype) -> None:
    compare(*SHAPES[name], form, dtype)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_meet_in_any_order(form: Form, is_reversed: bool) -> None:
    compare((3, 8, 40, 40), 2, form, torch.float16, is_reversed=is_reversed)


@pytest.mark.parametrize("alignment", [2, 4, 8])
def test_hardly_aligned(alignment: int) -> None:
    compare((2, 8, 30), 2, "kept", torch.float16, alignment=alignment)


@pytest.mark.parametrize("form", FORMS)
def test_without_parameters(form: Form) -> None:
    compare((2, 8, 30), 2, form, affine=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_large_mean_costs_no_more_than_it_costs_pytorch(form: Form) -> None:
    input = torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(0)) + 3000
    found, *_ = group_norm_by_kernels(input, 2, None, None, SMALL, form)
    expected = F.group_norm(input.double(), 2, eps=EPS)
    by_pytorch = relative_error(F.group_norm(input, 2, eps=EPS), expected)
    assert relative_error(found, expected) <= 2 * by_pytorch


@pytest.mark.basic(2)
@pytest.mark.parametrize("seed", range(12))
def test_random_group_norms(seed: int) -> None:
    source = random.Random(seed)
    groups = source.choice([1, 2, 3, 8, 32])
    shape = (source.randint(1, 4), groups * source.choice([1, 2, 3, 10]))
    shape += tuple(source.randint(1, 9) for _ in range(source.randint(0, 3)))
    dtype = source.choice(list(TOLERANCES))
    gpu = replace(SMALL, multiprocessors=source.randint(1, 7))
    is_reversed = source.random() < 0.5
    compare(shape, groups, source.choice(FORMS), dtype, gpu=gpu, seed=seed, is_reversed=is_reversed)


def compare_in_channels_last(
    shape: tuple[int, ...],
    groups: int,
    form: Form,
    dtype: torch.dtype = torch.float32,
    *,
    parameters: torch.dtype | None = None,
    offset: float = 1.0,
    gpu: Any = SMALL,
    seed: int = 0,
    **options: Any,
) -> None:
    """Asserts that the kernels' results, forward and backward, are PyTorch's in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random_of(size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    def rows_of(size: Sequence[int]) -> Tensor:
        return random_of((size[0], *size[2:], size[1]), dtype).movedim(-1, 1)

    input, grad_output = (2 * rows_of(shape) + offset).to(dtype), rows_of(shape)
    weight, bias = (None if parameters is None else random_of(shape[1:2], parameters) for _ in "wb")
    found = group_norm_in_channels_last(
        input, groups, weight, bias, grad_output, gpu, form, **options
    )
    x = input.double().requires_grad_()
    scale, shift = (
        torch.full(shape[1:2], value, dtype=torch.float64) if one is None else one.detach().double()
        for one, value in ((weight, 1.0), (bias, 0.0))
    )
    output = F.group_norm(x, groups, scale.requires_grad_(), shift.requires_grad_(), EPS)
    grads = torch.autograd.grad(output, (x, scale, shift), grad_output.double())
    var, mean = torch.var_mean(input.double().reshape(shape[0], groups, -1), -1, correction=0)
    tolerance = TOLERANCES[dtype]
    assert_close(found[0], output, tolerance, "output")
    assert found[0].stride() == input.stride()
    assert_close(found[1], mean, 3e-6, "mean")
    assert_close(found[2], torch.rsqrt(var + EPS), 3e-6, "inverse deviation")
    if options.get("wants_input", True):
        assert_close(found[3], grads[0], max(tolerance, 1e-5), "gradient of the input")
        assert found[3].stride() == input.stride()
    assert_close(found[4], grads[1], 2e-5, "gradient of the weight")
    assert_close(found[5], grads[2], 2e-5, "gradient of the bias")


ROWS = {
    "each channel, one image": ((1, 32, 8, 9), 32),
    "each channel, images": ((3, 32, 5, 7, 4), 32),
    "an odd number of channels": ((2, 7, 9, 3), 7),
    "one place more than a step": ((2, 66, 129), 66),
    "channels of several slabs": ((2, 160, 40), 160),
    "groups of a few channels": ((2, 32, 8, 8), 8),
    "groups that reach over slabs": ((2, 320, 30), 32),
    "one group of all": ((3, 72, 21), 1),
    "odd groups": ((2, 15, 6, 6), 5),
    "two places": ((4, 24, 2), 6),
}


@pytest.mark.basic(12)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("form", FORMS)
def test_in_channels_last(form: Form, name: str, dtype: torch.dtype) -> None:
    compare_in_channels_last(*ROWS[name], form, dtype, parameters=torch.float32)


@pytest.mark.parametrize("groups", [24, 4])
@pytest.mark.parametrize("form", FORMS)
def test_in_channels_last_in_any_order(form: Form, groups: int) -> None:
    for is_reversed in (False, True):
        compare_in_channels_last(
            *((3, 24, 600), groups, form, torch.float16),
            parameters=torch.float16,
            is_reversed=is_reversed,
        )
    schedule = Schedule(resident=3, seed=5, launches=2)
    compare_in_channels_last((2, 24, 700), groups, form, torch.float16, schedule=schedule)


@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize("groups", [16, 4])
def test_hardly_aligned_in_channels_last(groups: int, alignment: int) -> None:
    compare_in_channels_last(
        *((2, 16, 30), groups, "kept", torch.bfloat16),
        parameters=torch.bfloat16,
        alignment=alignment,
    )


@pytest.mark.parametrize("groups", [16, 4])
def test_without_the_gradient_of_the_input(groups: int) -> None:
    compare_in_channels_last((2, 16, 30), groups, "kept", wants_input=False)


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_large_mean_in_channels_last(form: Form, groups: int) -> None:
    input = torch.randn(2, 30, 8, generator=torch.Generator().manual_seed(0)).movedim(-1, 1) + 3000
    tensors = (input, groups, None, None, torch.ones_like(input))
    found, *_ = group_norm_in_channels_last(*tensors, SMALL, form)
    expected = F.group_norm(input.double(), groups, eps=EPS)
    by_pytorch = relative_error(F.group_norm(input.contiguous(), groups, eps=EPS), expected)
    assert relative_error(found, expected) <= 2 * by_pytorch


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_stays_in_its_group(form: Form, groups: int, value: float) -> None:
    input = torch.randn(2, 30, 8).movedim(-1, 1)
    input[1, 5, 7] = value
    grad_output = torch.randn_like(input)
    found = group_norm_in_channels_last(input, groups, None, None, grad_output, SMALL, form)
    x = input.clone().requires_grad_()
    expected = F.group_norm(x, groups, eps=EPS)
    (grad,) = torch.autograd.grad(expected, x, grad_output)
    assert torch.equal(found[0].isnan(), expected.isnan())
    assert torch.equal(found[3].isnan(), grad.isnan())


@pytest.mark.basic(2)
@pytest.mark.parametrize("seed", range(12))
def test_random_in_channels_last(seed: int) -> None:
    source = random.Random(seed)
    groups = source.choice([1, 2, 3, 8, 32])
    channels = groups * source.choice([1, 1, 2, 3, 10])
    spatial = tuple(source.randint(2, 9) for _ in range(source.randint(1, 3)))
    dtype = source.choice(list(TOLERANCES))
    compare_in_channels_last(
        *((source.randint(1, 4), channels, *spatial), groups, source.choice(FORMS), dtype),
        parameters=source.choice([None, torch.float32, dtype]),
        gpu=replace(SMALL, multiprocessors=source.randint(1, 7)),
        seed=seed,
        is_reversed=source.random() < 0.5,
    )


def test_what_the_kernels_do_not_take() -> None:
    problem = NormProblem(
        False, torch.float16, torch.float16, 4, 64, 196, True, 16, "identity", groups=8
    )
    assert unsupported_by_kernels(problem) is None
    assert "group norm" in str(unsupported_by_kernels(replace(problem, is_backward=True)))
    rows = replace(problem, batch=2, planes=False)
    assert unsupported_by_kernels(rows) is None
    assert unsupported_by_kernels(replace(rows, is_backward=True)) is None
    for change in ({"residual": True}, {"activation": "silu"}):
        assert "group norm" in str(unsupported_by_kernels(replace(rows, **change)))  # type: ignore[arg-type]
    for large in ({"batch": 2**20}, {"spatial": 2**25}):
        assert "2^31" in str(unsupported_by_kernels(replace(rows, **large)))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_they_compile(capability: tuple[int, int]) -> None:
    gpu = replace(gpu_of("h100" if capability > (7, 5) else "t4"), compute_capability=capability)
    for dtype in TOLERANCES:
        problem = NormProblem(False, dtype, dtype, 4, 64, 196, True, 16, "identity", groups=8)
        rows = replace(problem, batch=2, planes=False)
        each = [replace(rows, groups=64), replace(rows, groups=64, is_backward=True)]
        for one in (problem, rows, replace(rows, is_backward=True), *each):
            for (plan,) in distinct_plans([one], gpu).values():
                for launch in plan.launches:
                    assert cubin(launch.kernel, capability)
