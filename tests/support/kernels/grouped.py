"""Small grouped convolutions, with the widths of those of well-known models."""

from __future__ import annotations

from typing import Any

import pytest
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
EDGES: dict[str, tuple[Any, ...]] = {  # the operations, and the layer
    "an image smaller than a tile": ("fprop wgrad", (1, 2, 3), 2, 8),
    "one pixel": ("fprop dgrad wgrad", (3, 1, 1), 2, 24),
    "a kernel larger than the image": ("fprop dgrad wgrad", (1, 3, 2), 2, 8, 7, 1, 3),
    "padding as large as the kernel": ("fprop wgrad", (1, 6, 5), 2, 16, 3, 1, 4),
    "padding larger than the kernel, stride 2": ("dgrad", (1, 6, 5), 2, 8, 3, 2, 5),
    "no padding": ("fprop wgrad", (1, 11, 13), 2, 8, 5, 1, 0),
    "1x1": ("dgrad wgrad", (2, 9, 9), 2, 16, 1, 1, 0),
    "1x1, stride 2": ("fprop dgrad wgrad", (2, 9, 8), 2, 16, 1, 2, 0),
    "2x2, stride 2": ("dgrad", (1, 8, 9), 2, 8, 2, 2, 0),
    "not square": ("fprop dgrad wgrad", (1, 10, 12), 2, 8, (3, 5), (2, 1), (1, 2)),
    "a kernel of one row": ("fprop", (1, 10, 12), 2, 8, (1, 7), (1, 2), (0, 3)),
    "other padding after than before": ("fprop dgrad wgrad", (1, 9, 9), 2, 8, 3, 2, (0, 1, 2, 1)),
    "rows of the input that no output reads": ("dgrad", (1, 10, 10), 2, 8, 3, 2, 0),
    "other widths in than out": ("fprop wgrad", (1, 9, 9), 2, (8, 24)),
    "other widths in than out, merged": ("fprop dgrad wgrad", (1, 9, 9), 4, (12, 4), 3, 2),
    "20 wide": ("dgrad wgrad", (1, 6, 6), 4, 20),
    "64 wide, stride 2": ("dgrad", (1, 9, 9), 2, 64, 3, 2),
    "5x5, merged, stride 2": ("fprop dgrad", (1, 9, 9), 4, 4, 5, 2, 2),
    "7x7": ("wgrad", (1, 9, 9), 2, 24, 7, 1, 3),
}


def edges(*ops: str) -> pytest.MarkDecorator:
    """Parametrizes ``op`` and ``layer`` by what ``EDGES`` has of these operations."""
    return pytest.mark.parametrize(
        ("op", "layer"),
        [
            pytest.param(op, layer, id=f"{name}-{op}")
            for name, (of, *layer) in EDGES.items()
            for op in of.split()
            if op in ops
        ],
    )


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
