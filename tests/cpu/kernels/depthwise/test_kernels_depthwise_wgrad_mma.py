"""Weight gradients of depthwise convolutions on tensor cores, in the emulation of CUDA."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation import WORK
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.depthwise_layers import depthwise

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.depthwise.depthwise_wgrad_mma import DepthwiseWgradMma

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

MMA = DepthwiseWgradMma()
FP16, BF16 = torch.float16, torch.bfloat16
PLAIN = {"memory_format": torch.contiguous_format}
TINY = dataclasses.replace(H200, multiprocessors=1)
"""A GPU whose few blocks compute many items each."""


def wgrad(
    n: int, c: int, size: tuple[int, ...], kernel: tuple[int, ...], **options: Any
) -> ConvProblem:
    return depthwise("wgrad", c, size, kernel, n=n, **options)


SHAPES = [
    # ConvNeXt: its planes, its last ones of which an mma takes two, and others
    wgrad(1, 16, (21, 19), (7, 7), padding=3),
    wgrad(3, 16, (7, 7), (7, 7), padding=3, dtype=BF16),
    wgrad(1, 6, (9, 70), (7, 7), padding=3),
    wgrad(1, 8, (9, 9), (7, 7), padding=3, alignment=(4, 32, 32)),
    wgrad(2, 8, (10, 14), (7, 7), padding=3, **PLAIN),
    wgrad(1, 5, (9, 13), (7, 7), padding=3, **PLAIN),
    # EfficientNet
    wgrad(2, 24, (14, 14), (5, 5), padding=2),
    wgrad(2, 16, (14, 12), (5, 3), padding=(2, 1), dtype=BF16),
    # RepLKNet, SLaK: filters of several warps and blocks
    wgrad(1, 4, (20, 18), (31, 31), padding=15),
    wgrad(2, 4, (7, 7), (13, 13), padding=6),
    wgrad(1, 2, (5, 20), (21, 5), padding=(10, 2)),
    # signals: Conformer's, one in two dimensions, and one that is shorter than the filter
    wgrad(2, 8, (150,), (31,), padding=15, **PLAIN),
    wgrad(2, 4, (1, 77), (1, 9), padding=(0, 4)),
    wgrad(2, 4, (5,), (15,), padding=9, **PLAIN),
    # padding that is unequal, beyond the filter, and none; an image below the filter
    wgrad(1, 8, (12, 12), (4, 6), padding=(0, 6, 2, 1)),
    wgrad(2, 8, (3, 2), (5, 3), padding=(7, 4)),
    wgrad(1, 8, (12, 15), (5, 5)),
]


@pytest.mark.basic(4)
@pytest.mark.parametrize("problem", SHAPES, ids=lambda problem: problem.text)
def test_fixed_shapes(problem: ConvProblem) -> None:
    conflicts = WORK.conflicts
    for i, gpu in enumerate((H200, TINY)):
        offers = MMA.offers(problem, gpu)
        check(MMA, problem, offers[0].settings, gpu=gpu, is_reversed=bool(i))
    assert WORK.conflicts == conflicts


@pytest.mark.slow
def test_all_offers() -> None:
    for problem in (SHAPES[0], SHAPES[8], SHAPES[11]):
        offers = MMA.offers(problem, H200)
        assert 2 <= len(offers) <= 6
        for offer in offers[1:]:
            check(MMA, problem, offer.settings)


@pytest.mark.slow
def test_random_shapes() -> None:
    """Sizes, paddings and channels vary; few kernels are compiled."""
    chosen = random.Random(0)
    for i in range(24):
        padding = tuple(chosen.randint(0, 6) for _ in range(4))
        down, across = chosen.randint(9, 16), chosen.randint(9, 16)
        size = (down + 4 - padding[0] - padding[2], across + 4 - padding[1] - padding[3])
        if min(size) < 1:
            continue
        channels = 2 * chosen.randint(5, 12)
        layout = PLAIN if i % 3 == 0 else {}
        problem = wgrad(chosen.randint(1, 3), channels, size, (5, 5), padding=padding, **layout)
        gpu = (H200, TINY)[i % 2]
        check(MMA, problem, MMA.offers(problem, gpu)[0].settings, gpu=gpu, seed=i)


@pytest.mark.basic(2)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["x", "y"])
def test_what_is_not_finite_goes_where_it_belongs(name: str, value: float) -> None:
    """In the corners, where zeros beyond the images meet it, and inside."""
    problem = wgrad(2, 16, (14, 14), (7, 7), padding=3)
    settings = MMA.offers(problem, H200)[0].settings
    for place in ((0, 3, 0, 0), (1, 5, 13, 13), (1, 2, 6, 7)):
        tensors = random_tensors(problem)
        tensors[name][place] = value
        check_not_finite(MMA, problem, settings, tensors)


def test_sums_are_divided_among_few_blocks() -> None:
    """The partial sums are few next to the tensors."""
    problem = wgrad(64, 96, (56, 56), (7, 7), padding=3)
    for offer in MMA.offers(problem, H200):
        assert 0 < offer.workspace_bytes <= 2 << 20
        recipe = MMA.recipe(problem, offer.settings, H200)
        assert recipe.workspace_bytes == offer.workspace_bytes
        assert recipe.launches[0].grid[0] > 132


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem("fprop", (2, 16, 9, 9), (16, 1, 7, 7), groups=16, dtype=FP16),
        ConvProblem("wgrad", (2, 16, 9, 9), (32, 1, 7, 7), groups=16, dtype=FP16),
        ConvProblem("wgrad", (2, 16, 9, 9), (16, 2, 7, 7), groups=8, dtype=FP16),
        wgrad(2, 16, (9, 9), (7, 7), dtype=torch.float32),
        wgrad(2, 16, (9, 9), (5, 5), stride=2),
        wgrad(2, 16, (9, 9), (5, 5), dilation=2),
        wgrad(2, 16, (9, 9), (1, 1)),
        wgrad(2, 16, (9, 9), (3, 3)),  # bound by DRAM
        wgrad(2, 16, (9, 9, 9), (3, 3, 3)),
        wgrad(2, 15, (9, 9), (7, 7)),
        wgrad(2, 16, (9, 9), (7, 7), alignment=(2, 32, 32)),
    ],
)
def test_what_it_does_not_compute(problem: ConvProblem) -> None:
    assert not MMA.offers(problem, H200)
