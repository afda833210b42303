"""``torch.nn.Sequential`` that computes some neighbours at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from cudnn_autotune.models import padding
from cudnn_autotune.nn.modules import Unscriptable
from cudnn_autotune.norms import batch_norms

_PAIRS: dict[type, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(batch_norms.CLASSES, batch_norms.computed_pair),
    **dict.fromkeys(padding.PADS, padding.convolved_pair),
}
"""The class of a module -> the function that computes it and the next module, or returns None."""


class Sequential(Unscriptable, nn.Sequential):
    """``torch.nn.Sequential`` that computes a batch norm and its activation at once, and zeros
    padded in front of a convolution by that, if no hook sees the tensor between them."""

    @batch_norms.with_signature_of(nn.Sequential.forward)
    def forward(self, input: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(input, Tensor) or _has_any_global_hook():
            return super().forward(input)
        modules = [*self]  # a subclass may leave some out
        place, last = 0, len(modules) - 1
        while place <= last:
            module: Any = modules[place]
            together = _PAIRS.get(type(module)) if place < last else None
            found = None if together is None else together(module, modules[place + 1], input)
            input = module(input) if found is None else found
            place += 1 if found is None else 2
        return input
