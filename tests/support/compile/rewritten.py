"""Compilations of models whose graphs are rewritten, on a CPU that takes the way of a GPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from support.conv.references import TOLERANCES, assert_close

OPTIONS = {"fuse": "always", "norms": "never", "compare": False, "cpp.weight_prepack": False}
"""Options of the backend that leave nothing to a measurement."""
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of a tensor's dimensions -> its layout with channels last."""


def run(model: nn.Module, x: Tensor, **options: Any) -> Any:
    """Returns the output of a copy of a model, compiled anew."""
    torch._dynamo.reset()
    ours = torch.compile(
        copy.deepcopy(model), backend="cudnn_autotune", options={**OPTIONS, **options}
    )
    with torch.no_grad():
        return ours(x)


def check_changing_weights(model: nn.Module, x: Tensor, *, freezing: bool) -> None:
    """Asserts that each call of a compiled model takes the weights of the moment."""
    options: dict[str, Any] = {**OPTIONS, "freezing": freezing}
    ours = torch.compile(model, backend="cudnn_autotune", options=options)
    with torch.no_grad():
        for _ in range(2):
            for one in model.parameters():
                nn.init.normal_(one)
            expected = copy.deepcopy(model).double()(x.double())
            assert_close(ours(x), expected, TOLERANCES[x.dtype])
