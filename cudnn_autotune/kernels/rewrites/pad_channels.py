"""Channels padded with zeros to a number for engines with tensor cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Buffer
from cudnn_autotune.kernels.rewrites.packing import Packing
from cudnn_autotune.kernels.rewrites.rewrite import (
    Form,
    Rewrite,
    is_channels_last,
    may_use_half,
    round_up,
)

_GRANULE = 8
"""The divisor of channels for engines with tensor cores, in 16-bit types."""
_FEWEST: Mapping[str, int] = {"fprop": 17, "dgrad": 1, "wgrad": 9}
"""Input channels from which padding gained on an H200. For fewer, cuDNN has other engines, and the
package has kernels."""


class PadChannels(Rewrite):
    """A rewrite with input channels, output channels or both padded with zeros.

    Let x', w', y' be the tensors with channels ``C' >= C`` and ``K' >= K``; further ones are zero
    in the operands. Then the first K channels of fprop's y', the first C of dgrad's dx' and the
    first K x C filters of wgrad's dw' are the result. A further channel adds ``0 * 0`` to a kept
    sum, so non-finite values spread as in the engine. A bias is padded as K is, so the engine has
    the epilogue in this form, too.

    Engines of 16-bit types with tensor cores need channels in multiples of 8.

    In ``channels_last`` only: cuDNN's engines for NCHW pad while they transpose.
    """

    name = "pad_channels"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a form of a convolution without groups if its channels are no multiple of 8, and
        no fewer than the constants above."""
        if problem.groups > 1 or not is_channels_last(problem) or not may_use_half(problem, gpu):
            return None
        k, c = problem.weight_shape[:2]
        if c < _FEWEST[problem.op]:
            return None
        to_c, to_k = round_up(c, _GRANULE), round_up(k, _GRANULE)
        if (to_c, to_k) == (c, k):
            return None
        if to_k > k and problem.residual:
            return None  # it would have to be padded at each call, and it is as large as y
        return _form(problem, to_c, to_k)


def _form(problem: ConvProblem, to_c: int, to_k: int) -> Form:
    (k, c, *kernel), (n, _, *space) = problem.weight_shape, problem.input_shape
    taps = math.prod(kernel)
    packings: dict[Buffer, Packing] = {"w": Packing(1, (k, taps), c, to_c, 1, (to_k, taps))}
    if to_c > c:
        packings["x"] = _padded(n * math.prod(space), c, to_c)
    if to_k > k:
        packings["y"] = _padded(n * math.prod(problem.output_shape[2:]), k, to_k)
        if problem.bias:
            packings["bias"] = _padded(1, k, to_k)
    inner = replace(problem, input_shape=(n, to_c, *space), weight_shape=(to_k, to_c, *kernel))
    return Form(inner, packings)


def _padded(rows: int, width: int, to_width: int) -> Packing:
    return Packing(rows, (1, 1), width, to_width, rows, (1, 1))
