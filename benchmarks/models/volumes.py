"""Networks of volumes and of videos, with random weights.

The 3-d U-Net is that of nnU-Net for patches of 128 x 128 x 128. V-Net has four of its five levels,
each with at most two convolutions and batch norms on the way down, and one convolution without a
norm on the way up. The decoder of videos is built as those of latent video models: causal in time,
with group norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _block3d(i: int, o: int, stride: int = 1) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, step in ((i, stride), (o, 1)):
        layers += [nn.Conv3d(channels, o, 3, step, 1), nn.InstanceNorm3d(o, affine=True)]
        layers.append(nn.LeakyReLU(0.01))
    return nn.Sequential(*layers)


class UNet3d(nn.Module):
    """forward: volumes (N, 1, D, H, W) -> scores of ``classes`` (N, ``classes``, D, H, W)."""

    def __init__(
        self, widths: Sequence[int] = (32, 64, 128, 256, 320, 320), classes: int = 3
    ) -> None:
        super().__init__()
        down = [(o, i) for i, o in pairwise(widths)]
        self.down = nn.ModuleList([_block3d(1, widths[0]), *(_block3d(i, o, 2) for o, i in down)])
        self.up = nn.ModuleList(nn.ConvTranspose3d(o, i, 2, 2) for o, i in reversed(down))
        self.blocks = nn.ModuleList(_block3d(2 * i, i) for _, i in reversed(down))
        self.out = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        kept.pop()
        for up, block in zip(self.up, self.blocks, strict=True):
            x = block(torch.cat([up(x), kept.pop()], 1))
        return self.out(x)


def _normed3d(i: int, o: int, taps: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv3d(i, o, taps, stride, (taps - 1) // 2)
    return nn.Sequential(conv, nn.BatchNorm3d(o), nn.PReLU(o))


class VNet(nn.Module):
    """forward: volumes (N, 1, D, H, W) -> scores of two classes (N, 2, D, H, W)."""

    def __init__(self, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.conv_in = nn.Conv3d(1, width, 5, padding=2)
        self.residual_in = nn.Sequential(_normed3d(width, width, 5))
        self.residuals, self.down, self.up, self.joined = (nn.ModuleList() for _ in range(4))
        for i, o in pairwise(widths):
            self.down.append(_normed3d(i, o, 2, 2))
            self.residuals.append(nn.Sequential(_normed3d(o, o, 5), _normed3d(o, o, 5)))
        for o, i in pairwise(reversed(widths)):
            self.up.append(nn.Sequential(nn.ConvTranspose3d(o, i, 2, 2), nn.PReLU(i)))
            self.joined.append(nn.Sequential(nn.Conv3d(2 * i, i, 5, padding=2), nn.PReLU(i)))
        self.out = nn.Conv3d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        x = x + self.residual_in(x)
        kept: list[Tensor] = []
        for down, residual in zip(self.down, self.residuals, strict=True):
            kept.append(x)
            x = down(x)
            x = x + residual(x)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), kept.pop()], 1))
        return self.out(x)


class CausalConv3d(nn.Conv3d):
    """A 3x3x3 convolution that sees no later frame: the first is preceded by two of zeros."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__(i, o, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1, 1, 1, 2, 0)))


class CausalBlock(nn.Module):
    """Two causal convolutions with a shortcut."""

    def __init__(self, i: int, o: int, groups: int = 32) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, i), CausalConv3d(i, o)
        self.norm2, self.conv2 = nn.GroupNorm(groups, o), CausalConv3d(o, o)
        self.shortcut = nn.Identity() if i == o else nn.Conv3d(i, o, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class VideoDecoder(nn.Module):
    """forward: latents (N, 16, T, H, W) -> frames (N, 3, 4 T - 3, 8 H, 8 W)."""

    def __init__(self, widths: Sequence[int] = (384, 384, 192, 96), groups: int = 32) -> None:
        super().__init__()
        i = widths[0]
        self.conv_in = CausalConv3d(16, i)
        self.middle = nn.Sequential(CausalBlock(i, i, groups), CausalBlock(i, i, groups))
        self.levels, self.ups = nn.ModuleList(), nn.ModuleList()
        for level, o in enumerate(widths):
            self.levels.append(nn.Sequential(CausalBlock(i, o, groups), CausalBlock(o, o, groups)))
            if level < len(widths) - 1:
                self.ups.append(CausalConv3d(o, o))
            i = o
        self.out = nn.Sequential(nn.GroupNorm(groups, i), nn.SiLU(), CausalConv3d(i, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.conv_in(x))
        for number, level in enumerate(self.levels):
            x = level(x)
            if number < len(self.ups):
                frames = 2.0 if number < 2 else 1.0
                x = F.interpolate(x, scale_factor=(frames, 2.0, 2.0))
                x = self.ups[number](x[:, :, int(frames) - 1 :])
        return self.out(x)
