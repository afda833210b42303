"""Groups merged into fewer and wider ones, whose filters are block-diagonal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Buffer
from cudnn_autotune.engines.rewrites.packing import Packing
from cudnn_autotune.engines.rewrites.rewrite import (
    Form,
    Rewrite,
    channel_granule,
    inner_problem,
)

_NARROWEST, _WIDEST = 4, 64
"""Input channels of a group between which cuDNN's engines are far from the roofline."""
_MERGED_WIDTHS = (16, 32, 64)
"""Input channels of a merged group. cuDNN's engines for groups take powers of two; for others they
ask for the workspace of padded tensors."""
_MOST_DENSE_CHANNELS, _MOST_DENSE_GROUPS = 256, 16
"""Input channels and groups up to which all groups may become one, of any width."""


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

    def forms(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Form]:
        """Returns a form for each merged width: 16, 32, 64, and all groups in one if the groups and
        the channels are few."""
        granule = channel_granule(problem, gpu)
        g, c, k = problem.groups, problem.weight_shape[1], problem.weight_shape[0]
        if not granule or g == 1 or not _NARROWEST <= c <= _WIDEST:
            return ()
        counts = [width // c for width in _MERGED_WIDTHS if width % c == 0]
        if g <= _MOST_DENSE_GROUPS and g * c <= _MOST_DENSE_CHANNELS:
            counts.append(g)
        return [
            _form(problem, m)
            for m in dict.fromkeys(counts)
            if m > 1 and g % m == 0 and m * c % granule == 0 and m * (k // g) % granule == 0
        ]


def _form(problem: ConvProblem, merged: int) -> Form:
    k, c, *kernel = problem.weight_shape
    # In NCHW a group's channels lie together with the kernel's elements.
    is_contiguous = problem.memory_format == torch.contiguous_format
    taps = 1 if is_contiguous else math.prod(kernel)
    channels = math.prod(problem.weight_shape[1:]) // taps
    packings: dict[Buffer, Packing] = {
        "w": Packing(
            *(k, (1, taps), channels, merged * channels, k, (1, taps)),
            block_rows=k // problem.groups,
            blocks=merged,
        )
    }
    inner = inner_problem(
        problem,
        packings,
        weight_shape=(k, merged * c, *kernel),
        groups=problem.groups // merged,
    )
    return Form(inner, packings, f"GROUPS={inner.groups}")
