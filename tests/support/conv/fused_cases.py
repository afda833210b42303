"""The activations of fused convolutions, as PyTorch computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda sums: sums,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "mish": F.mish,
    "leaky_relu(0.1)": partial(F.leaky_relu, negative_slope=0.1),
    "elu(0.7)": partial(F.elu, alpha=0.7),
}
NAMES = tuple(FUNCTIONS)[1:]
