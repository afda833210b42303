"""The model of a benchmark: a well-known network, or a miniature of one for dry runs."""

from __future__ import annotations

import importlib

import torch
from torch import nn

# Small gradients would vanish in float16, and zeros draw less power.
LOSS_SCALE = 1024.0


def _miniature() -> nn.Module:
    """A network with few channels, for dry runs."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    )


def create(name: str, device: str) -> nn.Module:
    """A model of torchvision's, or else of timm's, with random weights; ``timm:NAME`` is timm's. On
    the CPU it is the miniature, whatever the name."""
    model: nn.Module
    if device == "cpu":
        model = _miniature()
    elif name.startswith("timm:"):
        model = importlib.import_module("timm").create_model(name.removeprefix("timm:"))
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
