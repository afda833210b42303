"""FLOPs of the operators, for ``torch.utils.flop_counter.FlopCounterMode``: as PyTorch counts those
of its own convolutions, two for a multiplication and an addition.

That module imports triton where it is installed, which this package must not do on its own: the
formulas are registered where the module is there already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from cudnn_autotune import _extension as _extension  # defines the operators

Shape = Sequence[int]

_COUNTER = "torch.utils.flop_counter"
_is_registered = False


def register_if_counted() -> None:
    """Registers the formulas, once, if something has imported PyTorch's counter."""
    global _is_registered
    if _is_registered or _COUNTER not in sys.modules:
        return
    _is_registered = True
    from torch.utils.flop_counter import conv_flop_count, register_flop_formula

    def fprop(x: Shape, w: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return conv_flop_count(list(x), list(w), list(out_shape))

    def dgrad(y: Shape, w: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return conv_flop_count(list(out_shape), list(w), list(y))

    def wgrad(y: Shape, x: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return conv_flop_count(list(x), list(out_shape), list(y))

    operators = torch.ops.cudnn_autotune
    register_flop_formula(operators.conv_fprop)(fprop)
    register_flop_formula(operators.conv_dgrad)(dgrad)
    register_flop_formula(operators.conv_wgrad)(wgrad)
