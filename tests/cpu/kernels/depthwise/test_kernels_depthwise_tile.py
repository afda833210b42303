"""Depthwise kernels whose pixels lie in shared memory, in the emulation of CUDA."""

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
from cudnn_autotune.kernels.depthwise.depthwise import Depthwise
from cudnn_autotune.kernels.depthwise.depthwise_tile import block_tiles

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

DEPTHWISE = Depthwise()
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.basic(2)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize(
    ("c", "size", "kernel", "options"),
    [
        # several tiles along both sides, and the last ones are not whole
        (96, (40, 33), (3, 3), {"stride": 2, "padding": 1}),
        (48, (31, 30), (5, 5), {"stride": 2, "padding": 2, "dtype": BF16}),
        (32, (37, 29), (3, 3), {"padding": 1}),
        # the last block's channels are not whole
        (104, (9, 9), (3, 3), {"stride": 2, "padding": 1}),
        (8, (6, 7), (3, 3), {"stride": 2}),
        # stride above the kernel, along one side only; padding beyond the kernel
        (72, (9, 11), (2, 3), {"stride": (3, 4), "padding": (1, 2)}),
        (40, (7, 30), (3, 4), {"stride": (1, 2), "padding": 3, "dtype": FP32}),
        (24, (5, 12), (5, 3), {"stride": (2, 1), "padding": (6, 5)}),
        # TensorFlow's padding
        (16, (12, 14), (3, 3), {"stride": 2, "padding": (0, 0, 1, 1), "dtype": FP32}),
    ],
)
def test_tiles(
    op: str, c: int, size: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    problem = depthwise(op, c, size, kernel, **options)
    tiles = block_tiles(problem, H200)
    assert tiles
    for i, tile in enumerate(random.Random(problem.text).sample(tiles, min(2, len(tiles)))):
        check(DEPTHWISE, problem, tile.settings, is_reversed=bool(i % 2))


@pytest.mark.basic(1)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_many_rows_of_a_thread(op: str) -> None:
    """On a GPU of one multiprocessor tiles are as large as on others those of many images."""
    gpu = dataclasses.replace(H200, multiprocessors=1)
    problem = depthwise(op, 32, (57, 41), (3, 3), stride=2, padding=1)
    tile = block_tiles(problem, gpu)[0]
    assert tile.rows >= 3
    check(DEPTHWISE, problem, tile.settings, gpu=gpu)


@pytest.mark.basic(2)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_goes_where_it_belongs(op: str, value: float) -> None:
    problem = depthwise(op, 16, (19, 18), (3, 3), stride=2, padding=1)
    for tile in block_tiles(problem, H200):
        tensors = random_tensors(problem)
        tensors["x" if op == "fprop" else "y"][1, 3, 2, 3] = value
        check_not_finite(DEPTHWISE, problem, tile.settings, tensors)


@pytest.mark.parametrize(
    "problem",
    [
        depthwise("fprop", 54, (18, 18), (3, 3), stride=2, padding=1),
        depthwise("fprop", 16, (18, 18), (3, 3), stride=2, alignment=(32, 32, 2)),
        depthwise("fprop", 16, (18, 18), (3, 3), stride=2, dilation=3),
        depthwise("fprop", 16, (18, 18), (1, 1), stride=2),
        depthwise("fprop", 16, (18, 18), (5, 5), padding=2),  # depthwise_mma computes it
        depthwise("fprop", 16, (18, 18), (3, 3), stride=2, memory_format=torch.contiguous_format),
        depthwise("fprop", 16, (4, 9, 9), (3, 3, 3), memory_format=torch.channels_last_3d),
    ],
    ids=lambda problem: problem.text,
)
def test_what_has_no_tiles(problem: ConvProblem) -> None:
    assert not block_tiles(problem, H200)
    older = dataclasses.replace(H200, compute_capability=(7, 5))
    assert not block_tiles(depthwise("fprop", 32, (18, 18), (3, 3), stride=2), older)
