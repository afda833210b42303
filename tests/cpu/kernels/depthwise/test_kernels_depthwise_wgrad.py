"""Weight gradients of depthwise convolutions on CUDA cores, in the emulation of CUDA."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.depthwise_layers import depthwise

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.depthwise.depthwise_wgrad import DepthwiseWgrad

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

WGRAD = DepthwiseWgrad()
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
TINY = dataclasses.replace(H200, multiprocessors=1)
"""A GPU whose few threads compute many strips each."""


def wgrad(
    n: int, c: int, size: tuple[int, ...], kernel: tuple[int, ...], **options: Any
) -> ConvProblem:
    return depthwise("wgrad", c, size, kernel, n=n, **options)


@pytest.mark.basic(4)
@pytest.mark.parametrize(
    "problem",
    [
        # EfficientNet, MobileNet: stride 2, and TensorFlow's padding
        wgrad(2, 24, (18, 18), (3, 3), stride=2, padding=1),
        wgrad(2, 16, (13, 12), (5, 5), stride=2, padding=2, dtype=BF16),
        wgrad(2, 16, (12, 14), (3, 3), stride=2, padding=(0, 0, 1, 1), dtype=FP32),
        wgrad(2, 13, (14, 14), (5, 5), padding=2),
        # ConvNeXt, in float32, and an odd number of channels
        wgrad(2, 9, (15, 18), (7, 7), padding=3, dtype=FP32),
        wgrad(2, 9, (11, 14), (3, 3), padding=1),
        # more channels than a block has
        wgrad(1, 540, (3, 3), (3, 3), padding=1),
        # DeepLab
        wgrad(1, 8, (11, 10), (3, 3), padding=3, dilation=(3, 2)),
        # stride above the kernel, stride with dilation, dilation beyond the image
        wgrad(2, 8, (9, 11), (2, 3), stride=(3, 4), padding=(1, 2), dtype=FP32),
        wgrad(2, 8, (16, 17), (3, 4), stride=(2, 3), dilation=(4, 2), padding=4, dtype=BF16),
        wgrad(1, 8, (5, 6), (2, 2), dilation=(9, 8), padding=9, dtype=FP32),
        # padding beyond the kernel, an image below it, a signal
        wgrad(2, 8, (2, 3), (5, 3), stride=(2, 1), padding=(6, 5), dtype=FP32),
        wgrad(2, 8, (1, 30), (1, 9), padding=(0, 4)),
        # R(2+1)D; stride and dilation of depths; none of a depth inside
        wgrad(2, 8, (7, 5, 4), (5, 1, 1), padding=(2, 0, 0), stride=(2, 1, 1), dtype=BF16),
        wgrad(2, 10, (3, 6, 9), (1, 3, 3), padding=(0, 1, 1)),
        wgrad(2, 8, (9, 5, 6), (3, 2, 2), stride=(2, 1, 2), dilation=(3, 2, 1), padding=(4, 1, 0)),
        wgrad(1, 9, (1, 4, 4), (2, 3, 3), padding=(3, 1, 1), dtype=FP32),
    ],
    ids=lambda problem: problem.text,
)
def test_fixed_shapes(problem: ConvProblem) -> None:
    for i, gpu in enumerate((H200, TINY)):
        offers = WGRAD.offers(problem, gpu)
        check(WGRAD, problem, offers[0].settings, gpu=gpu, is_reversed=bool(i))


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    "problem",
    [
        wgrad(2, 16, (20, 18), (3, 3), stride=2, padding=1),
        wgrad(2, 10, (4, 7, 9), (3, 3, 3), padding=1),
    ],
    ids=lambda problem: problem.text,
)
def test_all_offers(problem: ConvProblem) -> None:
    offers = WGRAD.offers(problem, TINY)
    assert 2 <= len(offers) <= 4
    for offer in offers:
        check(WGRAD, problem, offer.settings, gpu=TINY)


def test_depths_of_taps_are_divided_among_blocks() -> None:
    """Where the sums of all do not fit into a thread's registers."""
    problem = wgrad(1, 8, (4, 8, 9), (3, 5, 5), padding=2, stride=2)
    offers = WGRAD.offers(problem, H200)
    assert offers
    for offer in offers:
        assert "DEPTHS=1," in offer.settings
        check(WGRAD, problem, offer.settings)


def test_tensors_that_are_hardly_aligned() -> None:
    problem = wgrad(2, 16, (6, 6), (3, 3), stride=2, alignment=(32, 32, 2))
    offers = [offer.settings for offer in WGRAD.offers(problem, H200)]
    assert offers
    assert all(settings.startswith("CHANNELS=1,") for settings in offers)
    check(WGRAD, problem, offers[0])


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    "problem",
    [
        # the sums of a block of two channels a thread exceed 48 KiB of shared memory, or registers
        wgrad(1, 256, (7, 7), (7, 7), stride=2, padding=3),
        wgrad(1, 8, (3, 8, 7), (3, 7, 7), padding=3, dtype=BF16),
    ],
    ids=lambda problem: problem.text,
)
def test_many_taps_of_half_types_have_one_channel_a_thread(problem: ConvProblem) -> None:
    offers = WGRAD.offers(problem, H200)
    assert offers
    for offer in offers:
        assert offer.settings.startswith("CHANNELS=1,")
        check(WGRAD, problem, offer.settings)


@pytest.mark.slow
def test_random_shapes() -> None:
    """Sizes, paddings, dilations and channels vary; few kernels are compiled."""
    chosen = random.Random(0)
    for i in range(60):
        kernel, stride, dtype = chosen.choice(
            (((3, 3), 2, FP16), ((3, 5), 2, BF16), ((3, 3), 1, FP32))
        )
        problem = wgrad(
            chosen.randint(1, 3),
            4 * chosen.randint(2, 12),
            (chosen.randint(7, 20), chosen.choice((7, 16))),
            kernel,
            dtype=dtype,
            stride=stride,
            padding=(chosen.randint(0, 6), 1, chosen.randint(0, 6), 1),
            dilation=(chosen.choice((1, 2, 3)), 1),
        )
        gpu = (H200, TINY)[i % 2]
        check(WGRAD, problem, WGRAD.offers(problem, gpu)[0].settings, gpu=gpu, seed=i)


@pytest.mark.basic(3)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("size", [(15, 15), (5, 9, 7)])
def test_what_is_not_finite_goes_where_it_belongs(
    name: str, value: float, size: tuple[int, ...]
) -> None:
    """In the corners, where zeros beyond the images and between strips meet it, and inside."""
    kernel = (3,) * len(size)
    problem = wgrad(2, 16, size, kernel, stride=2, padding=1)
    settings = WGRAD.offers(problem, TINY)[0].settings
    for image, channel, *place in ((0, 3, 0, 0, 0), (1, 5, -1, -1, -1), (1, 2, 2, 4, 3)):
        tensors = random_tensors(problem)
        tensors[name][(image, channel, *place[-len(size) :])] = value
        check_not_finite(WGRAD, problem, settings, tensors, gpu=TINY)


def test_sums_are_divided_among_few_blocks() -> None:
    """The partial sums are few next to the tensors."""
    problem = wgrad(64, 96, (112, 112), (3, 3), stride=2, padding=1)
    for offer in WGRAD.offers(problem, H200):
        assert 0 < offer.workspace_bytes <= 2 << 20
        recipe = WGRAD.recipe(problem, offer.settings, H200)
        assert recipe.workspace_bytes == offer.workspace_bytes
        assert recipe.launches[0].grid[0] >= 100


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(
            "fprop", (2, 16, 9, 9), (16, 1, 3, 3), groups=16, memory_format=torch.channels_last
        ),
        ConvProblem(
            "wgrad", (2, 16, 9, 9), (32, 1, 3, 3), groups=16, memory_format=torch.channels_last
        ),
        wgrad(2, 16, (9, 9), (3, 3), memory_format=torch.contiguous_format),
        wgrad(2, 16, (9, 9), (3, 3), dtype=torch.float64),
        wgrad(2, 4, (9, 9), (3, 3)),
        wgrad(2, 16, (9, 9), (1, 1)),
        wgrad(2, 16, (9, 9), (9, 9), dtype=FP32),
        wgrad(2, 16, (9, 9), (5, 5), padding=2),  # tensor cores compute it
        wgrad(2, 16, (9, 9, 9), (3, 3, 3), memory_format=torch.contiguous_format),
        wgrad(2, 16, (99, 9, 9), (65, 3, 3)),
    ],
    ids=lambda problem: problem.text,
)
def test_what_it_does_not_compute(problem: ConvProblem) -> None:
    assert not WGRAD.offers(problem, H200)
