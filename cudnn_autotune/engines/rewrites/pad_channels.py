"""Channels padded with zeros to a number that engines with tensor cores take."""

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
    round_up,
)

_HALF_OF_GRANULE = 4
"""Channels for which cuDNN has some engines of half types beside those for multiples of 8."""
_NARROWEST, _WIDEST = 3, 128
"""Channels of a group between which a power of two is worth the padding."""


class PadChannels(Rewrite):
    """Pads input channels, output channels or both with zeros.

    Let x', w', y' be the tensors with channels ``C' >= C`` and ``K' >= K``, of which the further
    ones are zero in the operands. Then the first K channels of fprop's y', the first C of dgrad's
    dx' and the first K x C filters of wgrad's dw' are the result. To a sum that is kept, a further
    channel adds ``0 * 0``, so non-finite values go where the definition sends them. A bias is
    padded as K is, so the engine has the epilogue in this form, too.

    Engines with tensor cores want channels in multiples of 8 (16-bit types) or 4 (TF32), of which
    the first layers of most networks have 3, and cuDNN's other engines take several times the time
    of the bytes. The engines for groups want a power of two in each group; for other widths, such
    as the 24 of RegNet, they ask for the workspace of padded tensors.

    In ``channels_last`` only: cuDNN's engines for NCHW pad while they transpose.
    """

    name = "pad_channels"

    def forms(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Form]:
        """Returns a form if the channels of a group, or of the convolution without groups, are not
        what engines want, or two forms where C may become 4 or 8."""
        granule = channel_granule(problem, gpu)
        if not granule or problem.memory_format == torch.contiguous_format:
            return ()
        c, k = problem.weight_shape[1], problem.weight_shape[0] // problem.groups
        if problem.groups == 1:
            to_c, to_k = [round_up(c, granule)], round_up(k, granule)
            if c < _HALF_OF_GRANULE < granule:
                to_c.insert(0, _HALF_OF_GRANULE)
        elif all(_NARROWEST <= width <= _WIDEST for width in (c, k)):
            to_c, to_k = [_power_of_two(c)], _power_of_two(k)
        else:
            return ()
        if to_k > k and problem.residual:
            return ()  # it would have to be padded at each call, and it is as large as y
        return [_form(problem, some, to_k) for some in to_c if (some, to_k) != (c, k)]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _form(problem: ConvProblem, to_c: int, to_k: int) -> Form:
    """The arguments are channels of a group."""
    groups, kernel = problem.groups, problem.weight_shape[2:]
    n, _, *space = problem.input_shape
    c, k = problem.weight_shape[1], problem.weight_shape[0] // groups
    taps = math.prod(kernel)
    packings: dict[Buffer, Packing] = {
        "w": Packing(groups, (k, taps), c, to_c, groups, (to_k, taps))
    }
    if to_c > c:
        packings["x"] = _padded(n * math.prod(space) * groups, c, to_c)
    if to_k > k:
        packings["y"] = _padded(n * math.prod(problem.output_shape[2:]) * groups, k, to_k)
        if problem.bias:
            packings["bias"] = _padded(groups, k, to_k)
    inner = inner_problem(
        problem,
        packings,
        input_shape=(n, to_c * groups, *space),
        weight_shape=(to_k * groups, to_c, *kernel),
    )
    return Form(inner, packings, f"C={to_c * groups},K={to_k * groups}")


def _padded(rows: int, width: int, to_width: int) -> Packing:
    return Packing(rows, (1, 1), width, to_width, rows, (1, 1))
