"""Models with convolutions in each number of dimensions, for training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models.made import Made
from support.norms.models import Residual


def grouped(width: int = 1) -> nn.Module:
    few, more = 8 * width, 12 * width
    return nn.Sequential(
        nn.Conv2d(few, more, 3, padding=1, groups=4),
        nn.SiLU(),
        nn.Conv2d(more, more, 3, groups=more, bias=False),
        nn.BatchNorm2d(more),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(more, few, 2, stride=2),
        nn.Conv2d(few, few, 1),
    )


def volumes(width: int = 1) -> nn.Module:
    """A U-Net's way down and up."""
    few, more = 8 * width, 12 * width

    def forward(model: Any, x: Tensor) -> Tensor:
        high = F.leaky_relu(model.norm(model.first(x)), 0.01, inplace=True)
        low = F.leaky_relu(model.norm2(model.down(high)), 0.01)
        y = torch.cat([model.up(low), high], 1)
        result: Tensor = model.last(F.group_norm(y, 4))
        return result

    return Made(
        forward,
        first=nn.Conv3d(few, few, 3, padding=1, bias=False),
        norm=nn.InstanceNorm3d(few, affine=True),
        down=nn.Conv3d(few, more, 3, stride=2, padding=1, bias=False),
        norm2=nn.InstanceNorm3d(more, affine=True),
        up=nn.ConvTranspose3d(more, few, 2, 2),
        last=nn.Conv3d(2 * few, few, 1),
    )


def waves(width: int = 1) -> nn.Module:
    few, more = 8 * width, 16 * width
    return nn.Sequential(
        nn.Conv1d(few, more, 7, padding=3, stride=2),
        nn.GroupNorm(4, more),
        nn.GELU(),
        nn.Conv1d(more, more, 3, padding=2, dilation=2, groups=2, bias=False),
        nn.BatchNorm1d(more),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose1d(more, few, 4, 2, 1),
    )


def residual(width: int = 1) -> nn.Module:
    return Residual(8 * width)


MODELS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "grouped": (grouped, (2, 8, 10, 12)),
    "volumes": (volumes, (2, 8, 12, 12, 12)),
    "waves": (waves, (2, 8, 1024)),
    "residual": (residual, (4, 8, 6, 5)),
}
"""Functions of a multiple of the number of channels, and shapes of inputs."""
