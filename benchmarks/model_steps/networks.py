"""Networks that torchvision and timm do not have, of the sizes in use, with random weights.

The U-Net and the VAE decoder are those of Stable Diffusion 1.5; the detector is built as YOLOv8-S,
without its decoding of boxes; the 3-d U-Net is that of nnU-Net for patches of 128 x 128 x 128.
HiFi-GAN's generator is V1, without weight norm; Conv-TasNet separates two speakers, with global
norms; the Whisper encoder is that of Whisper tiny.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Of tokens (N, L, ``channels``) to a context (N, M, ``context``)."""

    def __init__(self, channels: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads, self.query = heads, nn.Linear(channels, channels, bias=False)
        self.key, self.value = (nn.Linear(context, channels, bias=False) for _ in range(2))
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = self.query(x), self.key(context), self.value(context)
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in tokens]
        joined = F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
        return self.out(joined)


class Transformer(nn.Module):
    """Attention of the pixels to one another and to the text, and a gated feed-forward layer."""

    def __init__(self, channels: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.conv_in, self.conv_out = (nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.itself = Attention(channels, channels, heads)
        self.text = Attention(channels, context, heads)
        self.gated = nn.Linear(channels, 8 * channels)
        self.linear = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        tokens = self.conv_in(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norms[0](tokens)
        tokens = tokens + self.itself(normed, normed)
        tokens = tokens + self.text(self.norms[1](tokens), text)
        value, gate = self.gated(self.norms[2](tokens)).chunk(2, -1)
        tokens = tokens + self.linear(value * F.gelu(gate))
        return x + self.conv_out(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))


class PixelAttention(nn.Module):
    """One head over all pixels, as in the middle of the VAE."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, channels), Attention(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(tokens, tokens).transpose(1, 2).unflatten(2, x.shape[2:])


class ResBlock(nn.Module):
    """Two convolutions with a shortcut; the embedding of the time is added between them, if it has
    ``time`` channels; then ``attention``, if there is any."""

    def __init__(self, i: int, o: int, time: int = 0, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, i), nn.Conv2d(i, o, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, o), nn.Conv2d(o, o, 3, padding=1)
        self.time = nn.Linear(time, o) if time else None
        self.shortcut = nn.Identity() if i == o else nn.Conv2d(i, o, 1)
        self.attention = attention

    def forward(self, x: Tensor, time: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None and time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))
        return y if self.attention is None else self.attention(y, text)


def _upsample(channels: int) -> nn.Module:
    return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(channels, channels, 3, padding=1))


def _output(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.GroupNorm(32, i), nn.SiLU(), nn.Conv2d(i, o, 3, padding=1))


class DiffusionUNet(nn.Module):
    """forward: latents (N, 4, H, W), time steps (N,), text (N, L, ``context``) -> noise."""

    def __init__(
        self, widths: Sequence[int] = (320, 640, 1280, 1280), context: int = 768, heads: int = 8
    ) -> None:
        super().__init__()
        first, last, time = widths[0], len(widths) - 1, 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(first, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(4, first, 3, padding=1)

        def block(i: int, o: int, attends: bool) -> nn.Module:
            return ResBlock(i, o, time, Transformer(o, context, heads) if attends else None)

        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, kept = first, [first]  # kept: the widths of what the way up concatenates
        for level, o in enumerate(widths):
            for i in (width, o):
                self.down.append(block(i, o, level < last))
            if level < last:
                self.down.append(nn.Conv2d(o, o, 3, stride=2, padding=1))
            kept += [o] * (3 if level < last else 2)
            width = o
        self.middle1, self.middle2 = block(width, width, True), block(width, width, False)
        for level in range(last, -1, -1):
            for _ in range(3):
                self.up.append(block(width + kept.pop(), widths[level], level < last))
                width = widths[level]
            if level:
                self.up.append(_upsample(width))
        self.out = _output(first, 4)

    def forward(self, x: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        half = self.conv_in.out_channels // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10000) / half))
        angles = steps.float()[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        x = self.conv_in(x)
        kept = [x]
        for module in self.down:
            x = module(x, time, text) if isinstance(module, ResBlock) else module(x)
            kept.append(x)
        x = self.middle2(self.middle1(x, time, text), time)
        for module in self.up:
            is_block = isinstance(module, ResBlock)
            x = module(torch.cat([x, kept.pop()], 1), time, text) if is_block else module(x)
        return self.out(x)


def vae_decoder(widths: Sequence[int] = (512, 512, 256, 128)) -> nn.Module:
    """Latents (N, 4, H, W) -> images (N, 3, 8 H, 8 W)."""
    i = widths[0]
    layers = [nn.Conv2d(4, 4, 1), nn.Conv2d(4, i, 3, padding=1)]
    layers += [ResBlock(i, i), PixelAttention(i), ResBlock(i, i)]
    for level, o in enumerate(widths):
        layers += [ResBlock(i, o), ResBlock(o, o), ResBlock(o, o)]
        layers += [_upsample(o)] if level < len(widths) - 1 else []
        i = o
    return nn.Sequential(*layers, _output(i, 3))


def _conv(i: int, o: int, k: int = 1, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(i, o, k, stride, k // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o), nn.SiLU())


class CSP(nn.Module):
    """Half of the channels pass blocks of two convolutions; what each gives is joined."""

    def __init__(self, i: int, o: int, depth: int, shortcut: bool) -> None:
        super().__init__()
        half = o // 2
        self.shortcut, self.split, self.join = shortcut, _conv(i, o), _conv(half * (2 + depth), o)
        self.blocks = nn.ModuleList(
            nn.Sequential(_conv(half, half, 3), _conv(half, half, 3)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.split(x).chunk(2, 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.shortcut else y)
        return self.join(torch.cat(parts, 1))


class Detector(nn.Module):
    """forward: images (N, 3, H, W) -> boxes and classes at strides 8, 16 and 32."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256, 512)) -> None:
        super().__init__()
        self.stem = _conv(3, widths[0], 3, 2)
        self.backbone = nn.ModuleList(
            nn.Sequential(_conv(i, o, 3, 2), CSP(o, o, depth, shortcut=True))
            for (i, o), depth in zip(pairwise(widths), (1, 2, 2, 1), strict=True)
        )
        a, b, c = widths[2:]
        self.pool_in, self.pool_out = _conv(c, c // 2), _conv(2 * c, c)
        self.up1, self.up2 = CSP(b + c, b, 1, False), CSP(a + b, a, 1, False)
        self.down1, self.down2 = _conv(a, a, 3, 2), _conv(b, b, 3, 2)
        self.csp1, self.csp2 = CSP(a + b, b, 1, False), CSP(b + c, c, 1, False)

        def heads(width: int, o: int) -> nn.ModuleList:
            return nn.ModuleList(
                nn.Sequential(_conv(i, width, 3), _conv(width, width, 3), nn.Conv2d(width, o, 1))
                for i in (a, b, c)
            )

        self.boxes, self.classes = heads(64, 64), heads(max(a, 80), 80)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = self.stem(x), []
        for stage in self.backbone:
            x = stage(x)
            found.append(x)
        a, b, c = found[1:]
        pooled = [self.pool_in(c)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        c = self.pool_out(torch.cat(pooled, 1))
        b = self.up1(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        a = self.up2(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        b = self.csp1(torch.cat([self.down1(a), b], 1))
        c = self.csp2(torch.cat([self.down2(b), c], 1))
        heads = zip((a, b, c), self.boxes, self.classes, strict=True)
        return [torch.cat([boxes(x), classes(x)], 1) for x, boxes, classes in heads]


def _block3d(i: int, o: int, stride: int = 1) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, step in ((i, stride), (o, 1)):
        layers += [nn.Conv3d(channels, o, 3, step, 1), nn.InstanceNorm3d(o, affine=True)]
        layers.append(nn.LeakyReLU(0.01))
    return nn.Sequential(*layers)


class UNet3d(nn.Module):
    """forward: volumes (N, 1, D, H, W) -> three classes of each voxel."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256, 320, 320)) -> None:
        super().__init__()
        down = [(o, i) for i, o in pairwise(widths)]
        self.down = nn.ModuleList([_block3d(1, widths[0]), *(_block3d(i, o, 2) for o, i in down)])
        self.up = nn.ModuleList(nn.ConvTranspose3d(o, i, 2, 2) for o, i in reversed(down))
        self.blocks = nn.ModuleList(_block3d(2 * i, i) for _, i in reversed(down))
        self.out = nn.Conv3d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        kept.pop()
        for up, block in zip(self.up, self.blocks, strict=True):
            x = block(torch.cat([up(x), kept.pop()], 1))
        return self.out(x)


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


class WhisperLayer(nn.Module):
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
        self.layers = nn.ModuleList(WhisperLayer(channels, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(x)))).transpose(1, 2)
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


# Name -> what builds it, and a tiny one for a dry run.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "sd_unet": (DiffusionUNet, lambda: DiffusionUNet((32, 64), context=76, heads=2)),
    "sd_vae_decoder": (vae_decoder, lambda: vae_decoder((64, 64, 32))),
    "detector": (Detector, lambda: Detector((8, 8, 16, 16, 32))),
    "unet3d": (UNet3d, lambda: UNet3d((4, 8, 8))),
    "hifigan": (HiFiGAN, lambda: HiFiGAN(16, (4, 2), (3, 5), (1, 3))),
    "conv_tasnet": (ConvTasNet, lambda: ConvTasNet(16, 8, 16, 2, 2)),
    "whisper_encoder": (WhisperEncoder, lambda: WhisperEncoder(16, 1, 2)),
}
