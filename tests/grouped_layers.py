"""Small grouped convolutions, with the widths of those of well-known models."""

from __future__ import annotations

from typing import Any

import torch

from cudnn_autotune.engines.problem import ConvProblem

LAYERS = {
    "RegNetY-3.2": ((2, 14, 14), 3, 24),
    "RegNetY-3.2, images of 7 x 7": ((5, 7, 7), 3, 24),
    "RegNetY-3.2, stride 2": ((2, 14, 14), 3, 24, 3, 2),
    "ResNeXt, 4 wide": ((1, 20, 12), 8, 4),
    "ResNeXt, 8 wide, stride 2": ((1, 18, 14), 4, 8, 3, 2),
    "16 wide": ((1, 9, 17), 2, 16),
    "32 wide": ((1, 8, 8), 2, 32),
    "48 wide": ((1, 7, 9), 2, 48),
    "56 wide": ((1, 5, 7), 2, 56),
    "40 wide, stride 2": ((1, 9, 9), 2, 40, 3, 2),
}
"""(images, height, width), groups, channels a group; kernel and stride if not 3 and 1."""


def problem(
    op: str,
    x: tuple[int, int, int],
    groups: int,
    width: int | tuple[int, int],
    kernel: int | tuple[int, int] = 3,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, ...] = 1,
    **options: Any,
) -> ConvProblem:
    """A problem with an input of (images, height, width) and ``width`` channels a group."""
    c, k = (width, width) if isinstance(width, int) else width
    kernels = (kernel, kernel) if isinstance(kernel, int) else kernel
    options = {"dtype": torch.float16, "memory_format": torch.channels_last, **options}
    shape = (x[0], groups * c, *x[1:])
    return ConvProblem(
        op, shape, (groups * k, c, *kernels), stride, padding, groups=groups, **options
    )
