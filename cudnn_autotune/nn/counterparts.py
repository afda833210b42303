"""PyTorch's convolution functions, and this package's functions that replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import cudnn_autotune.functional as functional  # without __getattr__, which enters IMPORTING

# `torch.conv2d` is the same object as `torch.nn.functional.conv2d`.
COUNTERPARTS: dict[Any, Callable[..., Any]] = {
    getattr(F, name): getattr(functional, name) for name in functional.fast_functions
}
"""PyTorch's functions -> this package's."""

CONVOLUTIONS = {
    *COUNTERPARTS,
    *COUNTERPARTS.values(),
    *(getattr(torch.ops.aten, name) for name in functional.fast_functions),
}
"""Targets of convolutions' nodes in a graph of Dynamo: functions, and for a converted layer on a
GPU PyTorch's operators with a marked input."""
