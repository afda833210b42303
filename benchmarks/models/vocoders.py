"""Codecs, vocoders and a separation of sources, all of waves, with random weights.

EnCodec is the causal model of 24 kHz without its LSTM and quantizer; DAC's decoder is that of
44.1 kHz, MelGAN's generator that of the paper. Demucs has five of six levels, and no LSTM. BigVGAN
has two of three kernel sizes and dilations, a Hann window as its filter, and no activation in front
of the last convolution. Parallel WaveGAN's generator repeats frames in place of its upsampling
network. Convolutions have weight norm, but for those of Demucs and Parallel WaveGAN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


def _conv(i: int, o: int, taps: int, dilation: int = 1) -> nn.Module:
    padding = dilation * (taps // 2)
    return weight_norm(nn.Conv1d(i, o, taps, padding=padding, dilation=dilation))


def _reflected(i: int, o: int, taps: int, dilation: int = 1) -> list[nn.Module]:
    conv = weight_norm(nn.Conv1d(i, o, taps, dilation=dilation))
    return [nn.ReflectionPad1d(dilation * (taps // 2)), conv]


def _up(i: int, rate: int) -> nn.Module:
    return weight_norm(nn.ConvTranspose1d(i, i // 2, 2 * rate, rate, rate // 2))


class CausalConv(nn.Module):
    """A convolution that sees no later sample: the first is preceded by its reflection."""

    def __init__(self, i: int, o: int, taps: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.padding = weight_norm(nn.Conv1d(i, o, taps, stride)), taps - stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.padding, 0), mode="reflect"))


class CausalUp(nn.Module):
    """A transposed convolution without its last samples: (N, C, L) -> (N, C / 2, ``rate`` L)."""

    def __init__(self, i: int, rate: int) -> None:
        super().__init__()
        self.conv = weight_norm(nn.ConvTranspose1d(i, i // 2, 2 * rate, rate))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : -self.rate]


class Shortcut(nn.Module):
    """Layers with a shortcut, which is the identity if no other is given."""

    def __init__(self, layers: Sequence[nn.Module], shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.shortcut = nn.Sequential(*layers), shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.layers(x)


def encodec(width: int = 32, rates: Sequence[int] = (8, 5, 4, 2)) -> nn.Module:
    """Waves (N, 1, L) -> waves (N, 1, L), if L is a multiple of all of ``rates``."""

    def block(c: int) -> nn.Module:
        layers = [nn.ELU(), CausalConv(c, c // 2, 3), nn.ELU(), CausalConv(c // 2, c, 1)]
        return Shortcut(layers, CausalConv(c, c, 1))

    layers: list[nn.Module] = [CausalConv(1, width, 7)]
    for rate in reversed(rates):
        layers += [block(width), nn.ELU(), CausalConv(width, 2 * width, 2 * rate, rate)]
        width *= 2
    layers += [nn.ELU(), CausalConv(width, 128, 7), CausalConv(128, width, 7)]
    for rate in rates:
        layers += [nn.ELU(), CausalUp(width, rate), block(width // 2)]
        width //= 2
    return nn.Sequential(*layers, nn.ELU(), CausalConv(width, 1, 7))


class Snake(nn.Module):
    """A periodic activation, x + sin(a x)^2 / a, with an ``a`` of each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a + 1e-9).reciprocal() * torch.sin(self.a * x).pow(2)


def dac_decoder(width: int = 1536, rates: Sequence[int] = (8, 8, 4, 2)) -> nn.Module:
    """Latents (N, 1024, L) -> waves (N, 1, L times all of ``rates``)."""
    layers = [_conv(1024, width, 7)]
    for rate in rates:
        layers += [Snake(width), _up(width, rate)]
        width //= 2
        for dilation in (1, 3, 9):
            convs = _conv(width, width, 7, dilation), _conv(width, width, 1)
            layers.append(Shortcut([Snake(width), convs[0], Snake(width), convs[1]]))
    return nn.Sequential(*layers, Snake(width), _conv(width, 1, 7), nn.Tanh())


class Demucs(nn.Module):
    """forward: stereo (N, 2, L) -> that of four sources (N, 8, about L)."""

    def __init__(self, width: int = 64, depth: int = 5) -> None:
        super().__init__()
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        i, o = 2, width
        for level in range(depth):
            down = nn.Conv1d(i, o, 8, 4), nn.ReLU(), nn.Conv1d(o, 2 * o, 1), nn.GLU(1)
            up = nn.Conv1d(o, 2 * o, 3, padding=1), nn.GLU(1)
            last = nn.ConvTranspose1d(o, i if level else 8, 8, 4)
            self.down.append(nn.Sequential(*down))
            self.up.insert(0, nn.Sequential(*up, last, *([nn.ReLU()] if level else [])))
            i, o = o, 2 * o

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            skip = kept.pop()
            x = block(x[..., : skip.shape[-1]] + skip[..., : x.shape[-1]])
        return x


def melgan(width: int = 512, rates: Sequence[int] = (8, 8, 2, 2)) -> nn.Module:
    """Mel spectra (N, 80, L) -> waves (N, 1, L times all of ``rates``)."""
    layers = _reflected(80, width, 7)
    for rate in rates:
        layers += [nn.LeakyReLU(0.2), _up(width, rate)]
        width //= 2
        for dilation in (1, 3, 9):
            block = [nn.LeakyReLU(0.2), *_reflected(width, width, 3, dilation)]
            block += [nn.LeakyReLU(0.2), _conv(width, width, 1)]
            layers.append(Shortcut(block, _conv(width, width, 1)))
    return nn.Sequential(*layers, nn.LeakyReLU(0.2), *_reflected(width, 1, 7), nn.Tanh())


class AntiAliased(nn.Module):
    """A periodic activation at twice the rate, x + sin(a x)^2 / b, of (N, C, L)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(channels)) for _ in range(2))
        self.register_buffer("low_pass", torch.hann_window(12)[None, None] / 6)

    def forward(self, x: Tensor) -> Tensor:
        channels = len(self.a)
        taps = self.low_pass.expand(channels, -1, -1)
        x = F.pad(x, (5, 5), mode="replicate")
        x = 2 * F.conv_transpose1d(x, taps, stride=2, groups=channels)[..., 15:-15]
        a, b = self.a[None, :, None], self.b[None, :, None]
        x = x + (1.0 / (b + 1e-9)) * torch.sin(x * a).pow(2)
        return F.conv1d(F.pad(x, (5, 6), mode="replicate"), taps, stride=2, groups=channels)


class BigVGAN(nn.Module):
    """forward: mel spectra (N, 80, L) -> waves (N, 1, L times all of ``rates``)."""

    def __init__(self, width: int = 512, rates: Sequence[int] = (8, 8, 2, 2)) -> None:
        super().__init__()

        def pair(c: int, taps: int, dilation: int) -> nn.Module:
            convs = _conv(c, c, taps, dilation), _conv(c, c, taps)
            return Shortcut([AntiAliased(c), convs[0], AntiAliased(c), convs[1]])

        self.conv_in = _conv(80, width, 7)
        self.up, self.blocks = nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            self.up.append(_up(width, rate))
            width //= 2
            blocks = (nn.Sequential(*(pair(width, k, d) for d in (1, 3))) for k in (3, 7))
            self.blocks.append(nn.ModuleList(blocks))
        self.conv_out = _conv(width, 1, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(x)
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.conv_out(x))


class ParallelWaveGAN(nn.Module):
    """forward: noise (N, 1, L), mel spectra (N, 80, frames) -> waves (N, 1, L)."""

    def __init__(self, depth: int = 30, channels: int = 64) -> None:
        super().__init__()
        c, dilations = channels, [2 ** (layer % 10) for layer in range(depth)]
        self.conv_in = nn.Conv1d(1, c, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(c, 2 * c, 3, padding=dilation, dilation=dilation) for dilation in dilations
        )
        self.mel = nn.ModuleList(nn.Conv1d(80, 2 * c, 1, bias=False) for _ in dilations)
        self.out, self.skip = (
            nn.ModuleList(nn.Conv1d(c, c, 1) for _ in dilations) for _ in range(2)
        )
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(c, c, 1), nn.ReLU(), nn.Conv1d(c, 1, 1))

    def forward(self, x: Tensor, mel: Tensor) -> Tensor:
        mel = F.interpolate(mel, size=x.shape[-1])
        x = self.conv_in(x)
        skips: Tensor | int = 0
        layers = zip(self.dilated, self.mel, self.out, self.skip, strict=True)
        for dilated, conditioned, out, skip in layers:
            value, gate = (dilated(x) + conditioned(mel)).chunk(2, 1)
            gated = torch.tanh(value) * torch.sigmoid(gate)
            skips = skips + skip(gated)
            x = (x + out(gated)) * math.sqrt(0.5)
        return self.last(skips * math.sqrt(1 / len(self.dilated)))
