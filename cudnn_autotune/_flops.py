"""FLOPs of the operators, for ``torch.utils.flop_counter.FlopCounterMode``: as PyTorch counts those
of its own convolutions, two for a multiplication and an addition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from cudnn_autotune import _extension as _extension  # defines the operators

Shape = Sequence[int]

_OPERATORS = torch.ops.cudnn_autotune


@register_flop_formula(_OPERATORS.conv_fprop)
def fprop(input: Shape, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return conv_flop_count(list(input), list(weight), list(out_shape))


@register_flop_formula(_OPERATORS.conv_dgrad)
def dgrad(grad_output: Shape, weight: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return conv_flop_count(list(out_shape), list(weight), list(grad_output))


@register_flop_formula(_OPERATORS.conv_wgrad)
def wgrad(grad_output: Shape, input: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return conv_flop_count(list(input), list(out_shape), list(grad_output))
