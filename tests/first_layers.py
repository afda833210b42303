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

L4 = gpu_of("l4")


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
