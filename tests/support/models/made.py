"""Small models of tests: parts, and a function of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class Made(nn.Module):
    """A module of these parts; ``forward`` is a function of the module and of its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class ConditionedNorm(nn.Module):
    """A group norm that latents scale and shift, and a SiLU, as in CogVideoX and Kandinsky's MoVQ.

    Args:
        latents: number of their channels.
        dims: number of spatial dimensions.
    """

    def __init__(self, latents: int, channels: int, dims: int, groups: int = 32) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{dims}d")
        self.norm = nn.GroupNorm(groups, channels)
        self.scale, self.shift = conv(latents, channels, 1), conv(latents, channels, 1)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        return F.silu(self.norm(x) * self.scale(latents) + self.shift(latents))


class Block(nn.Module):
    """A residual block with a convolution in its shortcut."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(2 * width)
        self.second = nn.Conv2d(2 * width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(width, width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.activation = activation
        for norm in (self.norm, self.norm2, self.norm3):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        return self.activation(self.norm2(self.second(y)) + self.norm3(self.shortcut(x)))
