"""Depthwise convolutions on tensor cores, emulated on a CPU."""

from __future__ import annotations

import math
import random

import pytest
import torch
from support import cuda_emulation
from support.conv.fused_cases import NAMES
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.depthwise_layers import depthwise

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.depthwise.depthwise_mma import DepthwiseMma

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

DEPTHWISE = DepthwiseMma()


def layer(
    images: int,
    channels: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    op: str = "fprop",
    *,
    is_channels_last: bool = True,
    **options: object,
) -> ConvProblem:
    options = {"padding": tuple(k // 2 for k in kernel), **options}
    if not is_channels_last:
        options["memory_format"] = torch.contiguous_format
    return depthwise(op, channels, size, kernel, n=images, **options)


def settings(problem: ConvProblem, gpu: Gpu = H200) -> list[str]:
    return [offer.settings for offer in DEPTHWISE.offers(problem, gpu)]


@pytest.mark.basic(3)
@pytest.mark.parametrize(
    ("op", "images", "channels", "size", "kernel"),
    [
        ("fprop", 3, 24, (13, 56), (7, 7)),  # a strip has eight blocks of columns; ConvNeXt
        ("dgrad", 5, 16, (9, 28), (7, 7)),  # four
        ("dgrad", 9, 16, (14, 14), (7, 7)),  # two
        ("fprop", 17, 8, (7, 7), (7, 7)),  # one
        ("dgrad", 1, 8, (5, 120), (5, 5)),  # sixteen
        ("fprop", 2, 8, (12, 20), (13, 13)),  # two warps share a filter; RepLKNet
        ("dgrad", 1, 8, (18, 18), (31, 31)),  # four do
        ("dgrad", 2, 16, (12, 9), (3, 11)),
        ("fprop", 2, 16, (23, 9), (11, 1)),
    ],
)
def test_layers_of_models(
    op: str, images: int, channels: int, size: tuple[int, int], kernel: tuple[int, int]
) -> None:
    problem = layer(images, channels, size, kernel, op)
    before = cuda_emulation.WORK.conflicts
    for is_reversed in (False, True):
        check(DEPTHWISE, problem, settings(problem)[0], is_reversed=is_reversed)
    assert cuda_emulation.WORK.conflicts == before


@pytest.mark.slow
def test_every_offer_is_right() -> None:
    for kernel in ((7, 7), (31, 31)):
        problem = layer(3, 40, (21, 17), kernel)
        offered = settings(problem)
        assert 2 <= len(offered) <= 6
        assert len(set(offered)) == len(offered)
        for i, setting in enumerate(offered):
            check(DEPTHWISE, problem, setting, is_reversed=i % 2 == 1)


@pytest.mark.basic(2)
@pytest.mark.parametrize(
    ("op", "size", "kernel", "padding"),
    [
        ("fprop", (600,), (31,), (15,)),  # a signal in segments, conv1d of speech models
        ("dgrad", (600,), (31,), (30, 0)),  # causal
        ("dgrad", (301,), (65,), (32,)),  # rows begin at any address
        ("fprop", (11, 24), (5, 5), (2, 2)),
        ("dgrad", (11, 18), (5, 5), (3, 1)),
        ("fprop", (10, 13), (5, 5), (0, 8)),
    ],
)
def test_contiguous_tensors(
    op: str, size: tuple[int, ...], kernel: tuple[int, ...], padding: tuple[int, ...]
) -> None:
    problem = layer(
        2, 24, size, kernel, op, padding=padding, dtype=torch.bfloat16, is_channels_last=False
    )
    for is_reversed in (False, True):
        check(DEPTHWISE, problem, settings(problem)[0], is_reversed=is_reversed)


def test_addresses_that_are_aligned_to_two_bytes() -> None:
    problem = layer(
        1, 16, (6, 24), (5, 5), is_channels_last=False, alignment=(2, 2, 2), dtype=torch.bfloat16
    )
    check(DEPTHWISE, problem, settings(problem)[0])


@pytest.mark.basic(3)
@pytest.mark.parametrize(
    ("activation", "bias", "residual", "is_channels_last"),
    [
        *((activation, True, i % 2 == 0, i > 2) for i, activation in enumerate(NAMES)),
        ("", True, False, True),
        ("", False, True, False),
    ],
)
def test_epilogues(activation: str, bias: bool, residual: bool, is_channels_last: bool) -> None:
    problem = layer(
        2,
        24,
        (9, 11),
        (5, 5),
        is_channels_last=is_channels_last,
        bias=bias,
        residual=residual,
        activation=activation,
    )
    check(DEPTHWISE, problem, settings(problem)[0])


@pytest.mark.slow
def test_random_shapes() -> None:
    random_ = random.Random(0)
    for _ in range(80):
        padding = tuple(random_.randint(0, 7) for _ in range(4))
        size = tuple(
            random_.randint(max(1, 5 - low - high), 30)
            for low, high in zip(padding[:2], padding[2:], strict=True)
        )
        images, channels = random_.randint(1, 5), 8 * random_.randint(1, 3)
        problem = layer(images, channels, size, (5, 5), "dgrad", padding=padding)
        check(DEPTHWISE, problem, settings(problem)[0], is_reversed=random_.random() < 0.5)


@pytest.mark.basic(2)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("is_channels_last", [True, False])
def test_what_is_not_finite_reaches_what_depends_on_it(op: str, is_channels_last: bool) -> None:
    """Also where the matrices of the filter have zeros, and where two infinities meet."""
    problem = layer(2, 16, (12, 26), (5, 7), op, is_channels_last=is_channels_last)
    tensors = random_tensors(problem)
    read = tensors["y" if op == "dgrad" else "x"]
    read[0, 3, 5, 9] = torch.nan
    read[1, 3, 0, 0] = torch.inf
    read[1, 4, 11, 25] = -torch.inf
    read[1, 5, 6, 6:8] = torch.tensor([torch.inf, -torch.inf])
    tensors["w"][7, 0, 1, 2] = torch.inf
    # Whether padding is multiplied by an infinite weight is not defined.
    inside = (slice(None), [*range(7), *range(8, 16)])
    check_not_finite(DEPTHWISE, problem, settings(problem)[0], tensors, inside=inside)


@pytest.mark.basic(4)
@pytest.mark.parametrize("pattern", ["sparse", "dense", "zeros", "signs"])
@pytest.mark.parametrize(
    "problem",
    [
        layer(3, 24, (13, 56), (7, 7), dtype=torch.bfloat16),
        layer(9, 16, (14, 14), (7, 7), "dgrad"),
        layer(17, 8, (7, 7), (7, 7), bias=True, residual=True, activation="relu"),
        layer(1, 8, (5, 120), (5, 5), "dgrad"),
        layer(1, 8, (18, 18), (31, 31), "dgrad"),
        layer(2, 16, (12, 19), (3, 11), dtype=torch.bfloat16, is_channels_last=False),
        layer(2, 16, (23, 9), (11, 1)),
        layer(2, 24, (300,), (31,), "dgrad", padding=(30, 0), is_channels_last=False),
    ],
    ids=lambda problem: problem.text,
)
def test_signs_of_infinities(problem: ConvProblem, pattern: str) -> None:
    """Infinities and NaN anywhere, weights of zero and of one sign, and more outputs to compute
    again than a block lists at a time."""
    tensors = random_tensors(problem)
    read = tensors["y" if problem.op == "dgrad" else "x"]
    generator = torch.Generator().manual_seed(3)
    taps = min(200, math.prod(problem.weight_shape[2:]))
    share = {"sparse": 0.1, "dense": 1.0}.get(pattern, 0.3) / taps
    values = torch.tensor([torch.nan, torch.inf, -torch.inf])
    places = torch.rand(read.shape, generator=generator) < share
    drawn = torch.randint(3, read.shape, generator=generator)
    read.copy_(torch.where(places, values[drawn].to(read.dtype), read))
    if pattern == "zeros":
        tensors["w"][:, :, ..., ::2] = 0.0
        tensors["w"][::2] *= -0.0
    if pattern == "signs":
        tensors["w"].abs_()
    check_not_finite(DEPTHWISE, problem, settings(problem)[0], tensors)


def test_infinities_at_the_borders_of_a_tensor() -> None:
    """Nothing is read outside of it: NaN lies there."""
    for op, is_channels_last in (("fprop", True), ("dgrad", False)):
        problem = layer(2, 8, (13, 27), (7, 7), op, is_channels_last=is_channels_last)
        tensors = random_tensors(problem)
        read = tensors["y" if op == "dgrad" else "x"]
        read[0, :, 0, 0] = read[-1, :, -1, -1] = torch.inf
        check_not_finite(DEPTHWISE, problem, settings(problem)[0], tensors)


@pytest.mark.parametrize(
    "problem",
    [
        layer(2, 16, (9, 9), (7, 7), "wgrad"),
        layer(2, 16, (9, 9), (3, 3)),
        layer(2, 16, (9, 9), (7, 7), dtype=torch.float32),
        layer(2, 16, (9, 9), (7, 7), stride=2),
        layer(2, 16, (30, 30), (7, 7), dilation=(1, 2)),
        layer(2, 12, (9, 9), (7, 7)),
        layer(2, 16, (9, 9), (7, 7), alignment=(8, 32, 32)),
        layer(64, 16, (7, 7), (7, 7), is_channels_last=False),  # many copies of 2 bytes
        ConvProblem("fprop", (2, 16, 9, 9), (32, 1, 7, 7), groups=16, dtype=torch.float16),
        ConvProblem("fprop", (2, 16, 9, 9), (16, 2, 7, 7), groups=8, dtype=torch.float16),
    ],
    ids=lambda problem: problem.text,
)
def test_what_is_not_offered(problem: ConvProblem) -> None:
    assert settings(problem) == []
