"""The kernels of group norms, on the emulation of CUDA, against PyTorch in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import cuda_emulation
from support.conv.references import assert_close, relative_error
from support.norms.cases import EPS
from support.norms.launches import SMALL, TOLERANCES, group_norm_by_kernels
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


def test_what_the_kernels_do_not_take() -> None:
    problem = NormProblem(
        False, torch.float16, torch.float16, 4, 64, 196, True, 16, "identity", groups=8
    )
    assert unsupported_by_kernels(problem) is None
    for change in ({"planes": False}, {"is_backward": True}):
        assert "group norm" in str(unsupported_by_kernels(replace(problem, **change)))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_they_compile(capability: tuple[int, int]) -> None:
    gpu = replace(gpu_of("h100" if capability > (7, 5) else "t4"), compute_capability=capability)
    for dtype in TOLERANCES:
        problem = NormProblem(False, dtype, dtype, 4, 64, 196, True, 16, "identity", groups=8)
        for (plan,) in distinct_plans([problem], gpu).values():
            for launch in plan.launches:
                assert cubin(launch.kernel, capability)
