"""Residual blocks with batch norms whose statistics are fixed, as detectors have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class FrozenBatchNorm2d(nn.Module):
    """A batch norm of buffers alone, with torchvision's formula."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        vectors = (self.weight, self.bias, self.running_var, self.running_mean)
        weight, bias, variance, mean = (vector.reshape(1, -1, 1, 1) for vector in vectors)
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def _filled(norm: Any) -> Any:
    """The norm with running statistics, scale and shift of its own."""
    for name, value in norm.state_dict().items():
        if name != "num_batches_tracked":
            nn.init.uniform_(value, 0.5, 2)
    return norm


def frozen(channels: int) -> nn.Module:
    norm: nn.Module = _filled(FrozenBatchNorm2d(channels))
    return norm


def in_eval_mode(channels: int) -> nn.Module:
    norm: nn.Module = _filled(nn.BatchNorm2d(channels)).eval()
    return norm.requires_grad_(False)


def trained(channels: int) -> nn.Module:
    """A norm with fixed statistics, whose scale and shift are trained."""
    return in_eval_mode(channels).requires_grad_(True)


class Block(nn.Module):
    """A residual block of two convolutions and norms."""

    def __init__(self, norm: Callable[[int], nn.Module] = frozen, channels: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(channels), norm(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += x
        return self.relu(y)


GROUPS = ["conv + bias + relu", "conv + bias + residual + relu"]
"""A block's groups, in words."""


def step(call: Callable[[Tensor], Any], of: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The outputs and gradients of a step of a model."""
    x = x.clone().requires_grad_()
    outputs = call(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.double().sin().sum() for output in outputs).backward()
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    found["input"] = x.grad  # type: ignore[assignment]
    found.update({name: p.grad for name, p in of.named_parameters() if p.grad is not None})
    of.zero_grad()
    return found
