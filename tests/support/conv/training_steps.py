"""PyTorch's layer and ours with the same weights, side by side on the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import cudnn_autotune as ca
from support.conv.references import assert_close


def twin_layers(*arguments: Any, kind: str = "Conv2d", **keywords: Any) -> tuple[nn.Module, Any]:
    theirs = getattr(nn, kind)(*arguments, device="cuda", **keywords)
    ours = getattr(ca, kind)(*arguments, device="cuda", **keywords)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def training_step(module: nn.Module, input: Tensor) -> list[Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    input = input.detach().requires_grad_()
    output = module(input)
    value = output.float().sin().sum()
    return [output, *torch.autograd.grad(value, [input, *module.parameters()])]


def assert_same_step(
    theirs: nn.Module, ours: nn.Module, input: Tensor, allowed: float = 1e-5
) -> None:
    """The same values within ``allowed`` (relative, norm-wise), the same dtypes and strides."""
    for right, mine in zip(training_step(theirs, input), training_step(ours, input), strict=True):
        assert mine.dtype is right.dtype
        assert mine.stride() == right.stride()
        assert_close(mine, right, allowed)
