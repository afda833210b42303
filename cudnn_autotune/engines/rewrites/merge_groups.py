"""Groups merged into fewer and wider ones, whose filters are block-diagonal."""

from __future__ import annotations

import math
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Buffer
from cudnn_autotune.engines.rewrites.packing import Packing
from cudnn_autotune.engines.rewrites.rewrite import (
    Form,
    Rewrite,
    is_channels_last,
    may_use_half,
    may_use_tf32,
)

_WIDTHS = (4, 8)
"""Input channels of a group that gained on an H200; cuDNN computes wider ones well enough."""
_GRANULE = 8
"""Output channels of a merged group are a multiple of this number."""


class MergeGroups(Rewrite):
    """Merges m neighbouring groups at a time into one that is m times as wide.

    A filter of output channel k has c = C / groups input channels. The merged filter has m c, and
    is zero but for the c of k's own group: ``w'[k][b c + i] = w[k][i]`` with
    ``b = floor(k groups / K) mod m``. So fprop and dgrad are those of w', and only the filters are
    rewritten; wgrad's dw is what dw' has at the same places. It does m times the arithmetic, on
    tiles that tensor cores can fill.

    In fprop and dgrad a merged group multiplies the other groups' channels by zero, so a non-finite
    value spreads to the outputs of the same pixels in up to m - 1 other groups. Which channels of a
    pixel have a non-finite value changes; whether the pixel has one does not, and so a search for
    NaN or a scaler of gradients finds what it would find. wgrad spreads nothing.
    """

    name = "merge_groups"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a form with groups of 16, 32 or 64 channels, where this gained on an H200."""
        g, c, k = problem.groups, problem.weight_shape[1], problem.weight_shape[0]
        if g == 1 or c not in _WIDTHS:
            return None
        merged = _merged_width(problem, gpu) // c
        if merged < 2 or g % merged or merged * (k // g) % _GRANULE:
            return None
        return _form(problem, merged)


def _merged_width(problem: ConvProblem, gpu: Gpu) -> int:
    """Returns the input channels of a merged group; 0 where cuDNN or our kernels are as fast."""
    is_last = is_channels_last(problem)
    if may_use_tf32(problem, gpu) and is_last:
        if problem.op == "wgrad":
            return 64
        return 16 if problem.weight_shape[1] == _WIDTHS[0] else 0
    if may_use_half(problem, gpu) and problem.op != "wgrad":
        has_kernel = is_last and (problem.op == "dgrad" or set(problem.stride) == {1})
        return 0 if has_kernel else 32
    return 0


def _form(problem: ConvProblem, merged: int) -> Form:
    k, c, *kernel = problem.weight_shape
    # In NCHW a group's channels lie together with the kernel's elements.
    taps = math.prod(kernel) if is_channels_last(problem) else 1
    channels = math.prod(problem.weight_shape[1:]) // taps
    packings: dict[Buffer, Packing] = {
        "w": Packing(
            *(k, (1, taps), channels, merged * channels, k, (1, taps)),
            block_rows=k // problem.groups,
            blocks=merged,
        )
    }
    inner = replace(problem, weight_shape=(k, merged * c, *kernel), groups=problem.groups // merged)
    return Form(inner, packings)
