"""Networks of sounds, with random weights.

HiFi-GAN's generator is V1, without weight norm; Conv-TasNet separates two speakers, with global
norms; the Whisper encoder is that of Whisper tiny; wav2vec 2.0 is the base model, without weight
norm, with norms in front of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.images import Attention


class Periods(nn.Module):
    """A residual block of HiFi-GAN: for each dilation a dilated convolution and a plain one."""

    def __init__(self, channels: int, taps: int, dilations: Sequence[int]) -> None:
        super().__init__()

        def conv(dilation: int) -> nn.Module:
            padding = dilation * (taps // 2)
            return nn.Conv1d(channels, channels, taps, padding=padding, dilation=dilation)

        self.dilated = nn.ModuleList(conv(dilation) for dilation in dilations)
        self.plain = nn.ModuleList(conv(1) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            x = x + plain(F.leaky_relu(dilated(F.leaky_relu(x, 0.1)), 0.1))
        return x


class HiFiGAN(nn.Module):
    """forward: mel spectra (N, 80, L) -> waves (N, 1, L times all of ``rates``)."""

    def __init__(
        self,
        width: int = 512,
        rates: Sequence[int] = (8, 8, 2, 2),
        taps: Sequence[int] = (3, 7, 11),
        dilations: Sequence[int] = (1, 3, 5),
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv1d(80, width, 7, padding=3)
        self.up, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            up = nn.ConvTranspose1d(width, width // 2, 2 * rate, rate, rate // 2)
            self.up.append(up)
            width //= 2
            self.blocks.append(nn.ModuleList(Periods(width, k, dilations) for k in taps))
        self.conv_out = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.conv_out(F.leaky_relu(x)))


class Separation(nn.Module):
    """A block of Conv-TasNet: (N, C, L) -> the residual and the skip connection, of that shape."""

    def __init__(self, channels: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(channels, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden)),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            *(nn.PReLU(), nn.GroupNorm(1, hidden)),
        )
        self.residual, self.skip = (nn.Conv1d(hidden, channels, 1) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers(x)
        return x + self.residual(y), self.skip(y)


class ConvTasNet(nn.Module):
    """forward: a wave (N, 1, L) -> those of two speakers (N, 2, L)."""

    def __init__(
        self,
        features: int = 512,
        channels: int = 128,
        hidden: int = 512,
        depth: int = 8,
        repeats: int = 3,
    ) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, features, 16, 8, 4, bias=False)
        self.norm = nn.GroupNorm(1, features)
        self.bottleneck = nn.Conv1d(features, channels, 1)
        dilations = [2**i for i in range(depth)] * repeats
        self.blocks = nn.ModuleList(Separation(channels, hidden, d) for d in dilations)
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(channels, 2 * features, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(features, 1, 16, 8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        x = self.bottleneck(self.norm(encoded))
        skips: Tensor | float = 0.0
        for block in self.blocks:
            x, skip = block(x)
            skips = skips + skip
        masks = self.masks(skips).chunk(2, 1)
        return torch.cat([self.decoder(mask * encoded) for mask in masks], 1)


class TransformerLayer(nn.Module):
    """A layer of a transformer: tokens (N, L, C) -> tokens of the same shape."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = Attention(channels, channels, heads)
        self.linear1 = nn.Linear(channels, 4 * channels)
        self.linear2 = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed)
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class WhisperEncoder(nn.Module):
    """forward: mel spectra (N, 80, L) -> tokens (N, L / 2, ``channels``)."""

    def __init__(self, channels: int = 384, depth: int = 4, heads: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(80, channels, 3, padding=1)
        self.conv2 = nn.Conv1d(channels, channels, 3, stride=2, padding=1)
        self.positions = nn.Parameter(0.02 * torch.randn(1500, channels))
        self.layers = nn.ModuleList(TransformerLayer(channels, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2)
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Wav2Vec2(nn.Module):
    """forward: waves (N, 1, L) -> tokens (N, about L / 320, ``channels``)."""

    def __init__(
        self,
        features: int = 512,
        channels: int = 768,
        depth: int = 12,
        heads: int = 12,
        taps: int = 128,
        groups: int = 16,
    ) -> None:
        super().__init__()
        sizes = [(1, 10, 5), *[(features, 3, 2)] * 4, *[(features, 2, 2)] * 2]
        self.convs = nn.ModuleList(nn.Conv1d(i, features, k, s, bias=False) for i, k, s in sizes)
        self.first_norm, self.norm = nn.GroupNorm(features, features), nn.LayerNorm(features)
        self.projection = nn.Linear(features, channels)
        self.positions = nn.Conv1d(channels, channels, taps, padding=taps // 2, groups=groups)
        self.layers = nn.ModuleList(TransformerLayer(channels, heads) for _ in range(depth))
        self.last_norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        for number, conv in enumerate(self.convs):
            x = conv(x)
            x = F.gelu(x if number else self.first_norm(x))
        x = self.projection(self.norm(x.transpose(1, 2)))
        positions = F.gelu(self.positions(x.transpose(1, 2))[..., : x.shape[1]])
        x = self.last_norm(x + positions.transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return x
