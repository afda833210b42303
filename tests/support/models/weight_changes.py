"""Ways to change a model's weights that PyTorch counts no version for, or does in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def trained_by(optimizer: Callable[..., Any], **options: Any) -> Callable[[Any, Tensor], None]:
    def step(model: Any, x: Tensor) -> None:
        steps = optimizer(model.parameters(), lr=0.1, **options)
        model.train()
        (model(x) - 1).square().mean().backward()
        steps.step()
        steps.zero_grad()
        model.eval()

    return step


def statistics(model: Any, x: Tensor) -> None:
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(3 * x + 2)
    model.eval()


def swapped(model: Any, x: Tensor) -> None:
    """As an exponential moving average is taken for an evaluation."""
    for parameter in model.parameters():
        parameter.data.copy_(0.5 * parameter + 0.1)
