"""Small convolutions with few input channels, and what their kernels have in common."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import KernelLaunch, Recipe
from support.conv.fused_cases import NAMES

L4 = gpu_of("l4")
ODD_SHAPES: tuple[tuple[Any, ...], ...] = (
    ((1, 3, 2, 2), (8, 3, 5, 5), 1, 4),  # a kernel larger than the image
    ((2, 3, 5, 7), (8, 3, 3, 3), 3, (6, 4)),  # padding larger than the kernel
    ((1, 3, 9, 9), (8, 3, 3, 3), 2, (0, 1, 2, 0)),  # another padding behind
    ((2, 3, 6, 16), (8, 3, 1, 1)),
    ((1, 1, 7, 33), (8, 1, 1, 1)),
    ((1, 2, 9, 21), (40, 2, 2, 5), (3, 1), (1, 0)),
    ((1, 8, 9, 20), (16, 8, 3, 3), 2, 1),
    ((1, 5, 9, 20), (8, 5, 2, 2), (1, 3)),
    ((1, 3, 3, 16), (8, 3, 3, 3), 1, 0),  # one row of pixels
    ((1, 3, 4, 300), (8, 3, 3, 3), 1, 1),  # several tiles in a row
)
"""Arguments of :func:`first_layer`, in any direction."""
EPILOGUES = [
    {"bias": True},
    {"residual": True},
    {"bias": True, "activation": "relu", "dtype": torch.bfloat16},
    *({"bias": True, "residual": True, "activation": name} for name in NAMES),
]
"""Fields of a problem that say what the convolution is fused with."""
HEIGHT_1: dict[str, tuple[Any, ...]] = {
    "wav2vec2": ((2, 1, 1, 2013), (64, 1, 1, 10), (1, 5)),
    "Conv-TasNet": ((1, 1, 1, 4000), (48, 1, 1, 16), (1, 8)),
    "SEANet": ((1, 1, 1, 1000), (32, 1, 1, 7), 1, (0, 3)),
    "HiFi-GAN's discriminator": ((2, 1, 1, 301), (16, 1, 1, 15), 1, (0, 7)),
    "stereo": ((1, 2, 1, 1201), (24, 2, 1, 7), (3, 2), (0, 3)),
    "log-mel": ((1, 1, 1, 6001), (16, 1, 1, 400), (1, 160), (0, 200)),
    "one tile": ((1, 8, 1, 30), (8, 8, 1, 3), 1, (0, 1, 0, 0)),
}
"""Signals as images of height 1, as :data:`ODD_SHAPES`."""


def first_layer(
    op: str,
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: Any = 1,
    padding: Any = 0,
    **options: Any,
) -> ConvProblem:
    """A problem in float16 and channels_last, unless ``options`` say otherwise."""
    options = {"dtype": torch.float16, "memory_format": torch.channels_last, **options}
    return ConvProblem(op, input_shape, weight_shape, stride, padding, **options)


def random_first_layer(
    op: str, choose: random.Random, dtypes: Sequence[torch.dtype], **options: Any
) -> ConvProblem:
    """A small problem in one of the dtypes, with up to 8 input channels."""
    c = choose.randint(1, 8)
    kernel = (choose.randint(1, 5), choose.randint(1, 5))
    image = (choose.randint(5, 20), choose.randint(5, 50))
    return first_layer(
        op,
        (choose.randint(1, 2), c, *image),
        (8 * choose.randint(1, 6), c, *kernel),
        (choose.randint(1, 3), choose.randint(1, 3)),
        tuple(choose.randint(0, 4) for _ in range(4)),
        dtype=choose.choice(dtypes),
        **options,
    )


def assert_blocks_fit(recipe: Recipe, settings: str, gpu: Gpu) -> None:
    """Asserts that all blocks of the first launch can be on the GPU at once, as many on each
    multiprocessor as the settings say last."""
    launch = recipe.launches[0]
    assert isinstance(launch, KernelLaunch)
    blocks = int(settings.rpartition("=")[2])
    shared = launch.shared_bytes + gpu.reserved_shared_bytes
    assert blocks * shared <= gpu.sm_shared_bytes
    assert launch.grid[0] * launch.grid[1] <= blocks * gpu.multiprocessors
