"""Channels padded with zeros to a number that tensor cores take."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Buffer
from cudnn_autotune.engines.rewrites.packing import Packing, padded_rows
from cudnn_autotune.engines.rewrites.rewrite import (
    Form,
    Rewrite,
    channel_granule,
    inner_problem,
    round_up,
)

_HALF_OF_GRANULE = 4
"""Channels for which cuDNN has some engines of half types beside those for multiples of 8."""


class PadChannels(Rewrite):
    """Pads input channels, output channels or both with zeros.

    Let x', w', y' be the tensors with channels ``C' >= C`` and ``K' >= K``, of which the further
    ones are zero in the operands. Then the first K channels of fprop's y', the first C of dgrad's
    dx' and the first K x C filters of wgrad's dw' are the result. To a sum that is kept, a further
    channel adds ``0 * 0``, so non-finite values go where the definition sends them. A bias is
    padded as K is, so the engine has the epilogue in this form, too.

    Engines with tensor cores want channels in multiples of 8 (16-bit types) or 4 (TF32), of which
    the first layers of most networks have 3, and cuDNN's other engines take several times the time
    of the bytes. In ``channels_last`` only: cuDNN's engines for NCHW pad while they transpose.
    """

    name = "pad_channels"

    def forms(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Form]:
        """Returns a form if C or K is not a multiple of what tensor cores want, or two where C may
        become 4 or 8."""
        granule = channel_granule(problem, gpu)
        if not granule or problem.groups > 1 or problem.memory_format == torch.contiguous_format:
            return ()
        c, k = problem.input_shape[1], problem.weight_shape[0]
        to_k = round_up(k, granule)
        if to_k > k and problem.residual:
            return ()  # it would have to be padded at each call, and it is as large as y
        to_c = [round_up(c, granule)]
        if c < _HALF_OF_GRANULE < granule:
            to_c.insert(0, _HALF_OF_GRANULE)
        return [_form(problem, some, to_k) for some in to_c if (some, to_k) != (c, k)]


def _form(problem: ConvProblem, to_c: int, to_k: int) -> Form:
    n, c, *space = problem.input_shape
    k, _, *kernel = problem.weight_shape
    taps = math.prod(kernel)
    packings: dict[Buffer, Packing] = {"w": padded_rows(k * taps, c, to_k * taps, to_c)}
    if to_c > c:
        pixels = n * math.prod(space)
        packings["x"] = padded_rows(pixels, c, pixels, to_c)
    if to_k > k:
        pixels = n * math.prod(problem.output_shape[2:])
        packings["y"] = padded_rows(pixels, k, pixels, to_k)
        if problem.bias:
            packings["bias"] = padded_rows(1, k, 1, to_k)
    inner = inner_problem(
        problem,
        packings,
        input_shape=(n, to_c, *space),
        weight_shape=(to_k, to_c, *kernel),
    )
    return Form(inner, packings, f"C={to_c},K={to_k}")
