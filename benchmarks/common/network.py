"""The model of a benchmark: a well-known network, or a miniature of one for dry runs."""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Small gradients would vanish in float16, and zeros draw less power.
LOSS_SCALE = 1024.0


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.relu(self.bn(self.conv2(F.relu(self.conv1(x)))) + x)
        return out


class Miniature(nn.Module):
    """A residual network with few channels, for dry runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(_Block(8), _Block(8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.blocks(self.conv1(x)).mean((2, 3)))
        return out


def create(name: str, device: str) -> nn.Module:
    """A model of torchvision's, or else of timm's, with random weights. On the CPU it is the
    miniature, whatever the name."""
    model: nn.Module
    if device == "cpu":
        model = Miniature()
    else:
        try:
            model = importlib.import_module("torchvision").models.get_model(name, weights=None)
        except (ImportError, RuntimeError, ValueError):  # none that fits torch, or no such model
            model = importlib.import_module("timm").create_model(name)
    return model.to(device)


def build(name: str, device: str, dtype: torch.dtype) -> nn.Module:
    """As :func:`create`, channels_last, of ``dtype``; its batch norms stay in float32."""
    model = create(name, device).to(dtype)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model.train()
