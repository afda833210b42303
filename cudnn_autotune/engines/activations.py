"""The activations that a forward convolution can be fused with, and their names.

A name is a kind's, such as ``relu``. A kind with a parameter has it in brackets, as in
``leaky_relu(0.1)``: the same number is always written in the same way. ``prelu`` has its slopes in
a tensor, one for each channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_autotune.core.json_node import shown

ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "tanh": torch.tanh,
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "prelu": F.prelu,
}
"""PyTorch's function by kind. It takes a tensor, and the parameter of a kind that has one; of
``prelu`` the slopes, of shape ``(C,)``."""
PARAMETERS: Mapping[str, str] = {"leaky_relu": "negative_slope", "elu": "alpha"}
"""The parameter's name, in PyTorch's function, of each kind that has one."""
LEAST_PARAMETER, MOST_PARAMETER = 1e-4, 1e3
"""Limits of a parameter. Python and C++ write all numbers between them without an exponent."""

_NAME = re.compile(r"(\w+)(?:\((\d{1,4}(?:\.\d{1,30})?)\))?", re.ASCII)


@dataclass(frozen=True)
class Activation:
    """An activation: a kind, and the parameter of a kind that has one."""

    kind: str
    parameter: float | None = None

    @classmethod
    def named(cls, name: object) -> Activation:
        """Returns the activation of a name.

        Raises:
            ValueError: there is none; the text says which are allowed.
        """
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is not None and match[1] in ACTIVATIONS:
            parameter = None if match[2] is None else float(match[2])
            if is_parameter(match[1], parameter):
                return cls(match[1], parameter)
        allowed = ", ".join(k + "(PARAMETER)" * (k in PARAMETERS) for k in ACTIVATIONS)
        raise ValueError(
            f"activation must be '' or one of {allowed}, where PARAMETER is from {LEAST_PARAMETER} "
            f"to {MOST_PARAMETER:g}, got {shown(name)}"
        )

    @property
    def name(self) -> str:
        if self.parameter is None:
            return self.kind
        return f"{self.kind}({repr(self.parameter).removesuffix('.0')})"

    def __call__(self, input: Tensor, *slope: Tensor) -> Tensor:
        """Returns the result of PyTorch's function on a tensor, with the slopes of ``prelu``."""
        parameter = () if self.parameter is None else (self.parameter,)
        return ACTIVATIONS[self.kind](input, *parameter, *slope)


def is_parameter(kind: str, parameter: float | None) -> bool:
    """Returns whether a kind can have a parameter; None stands for having none."""
    if kind not in PARAMETERS or parameter is None:
        return kind not in PARAMETERS and parameter is None
    return LEAST_PARAMETER <= parameter <= MOST_PARAMETER
