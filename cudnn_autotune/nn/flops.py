"""The FLOPs of the operators, for ``torch.utils.flop_counter.FlopCounterMode``.

They are counted as PyTorch counts its own convolutions: two for a multiplication and an addition.
``torch.utils.flop_counter`` imports triton if it is installed, which this package must not do. So
the formulas are registered when something else imports that module.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from cudnn_autotune.core.after_import import after_import

Shape = Sequence[int]


def _register(flop_counter: ModuleType) -> None:
    count = flop_counter.conv_flop_count

    def fprop(x: Shape, w: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return int(count(list(x), list(w), list(out_shape)))

    def transpose(x: Shape, w: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return int(count(list(x), list(w), list(out_shape), transposed=True))

    def dgrad(y: Shape, w: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return int(count(list(out_shape), list(w), list(y)))

    def wgrad(y: Shape, x: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return int(count(list(x), list(out_shape), list(y)))

    operators = torch.ops.cudnn_autotune
    for operator, formula in (
        (operators.conv_fprop, fprop),
        (operators.conv_fused, fprop),
        (operators.conv_transpose, transpose),
        (operators.conv_dgrad, dgrad),
        (operators.conv_wgrad, wgrad),
    ):
        flop_counter.register_flop_formula(operator)(formula)


after_import("torch.utils.flop_counter", _register)
