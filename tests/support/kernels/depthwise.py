"""Small depthwise convolutions, in the layout that their kernels are mostly asked for."""

from __future__ import annotations

from typing import Any

import torch

from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem


def depthwise(
    op: str, c: int, size: tuple[int, ...], kernel: tuple[int, ...], **options: Any
) -> ConvProblem:
    """A problem of 2 images (``n``) with ``c`` channels, in float16 and channels_last, unless
    ``options`` say otherwise."""
    layout = CHANNELS_LAST.get(len(size), torch.contiguous_format)
    options = {"dtype": torch.float16, "memory_format": layout, "allow_tf32": False, **options}
    n, k = options.pop("n", 2), c * options.pop("multiplier", 1)
    return ConvProblem(op, (n, c, *size), (k, 1, *kernel), groups=c, **options)
