"""Networks of images that torchvision and timm do not have, with random weights.

The U-Net and the VAE decoder of diffusion are those of Stable Diffusion 1.5; the detector is built
as YOLOv8-S, without its decoding of boxes; StyleGAN2 is its synthesis network, with bilinear
upsampling in place of filters of its own. RIFE (arXiv 2011.06294) is its network of flows, from
coarse to fine, without the one that refines the frame. The ResNet with a feature pyramid is
torchvision's backbone of detectors: its batch norms are constants.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention of tokens (N, L, ``channels``) to a context (N, M, ``context``)."""

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
    """forward: latents (N, 4, H, W), time steps (N,), text (N, L, ``context``) -> noise. Without
    a context it has no attention, and takes no text."""

    def __init__(
        self, widths: Sequence[int] = (320, 640, 1280, 1280), context: int = 768, heads: int = 8
    ) -> None:
        super().__init__()
        first, last, time = widths[0], len(widths) - 1, 4 * widths[0]
        self.time = nn.Sequential(nn.Linear(first, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(4, first, 3, padding=1)

        def block(i: int, o: int, attends: bool) -> nn.Module:
            attention = Transformer(o, context, heads) if context and attends else None
            return ResBlock(i, o, time, attention)

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

    def forward(self, x: Tensor, steps: Tensor, text: Tensor | None = None) -> Tensor:
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


class FrozenResNetFPN(nn.Module):
    """forward: images (N, 3, H, W) -> features at strides 4 to 64. As torchvision trains it, the
    stem and the first stage have no gradients."""

    def __init__(self, name: str = "resnet50") -> None:
        super().__init__()
        parts = importlib.import_module("torchvision.models.detection.backbone_utils")
        self.backbone = parts.resnet_fpn_backbone(backbone_name=name, weights=None)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [*self.backbone(x).values()]


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each with a batch norm and a ReLU."""

    def __init__(self, i: int, o: int) -> None:
        convs = (nn.Conv2d(channels, o, 3, padding=1, bias=False) for channels in (i, o))
        super().__init__(*(part for conv in convs for part in (conv, nn.BatchNorm2d(o), nn.ReLU())))


class UNet(nn.Module):
    """forward: images (N, 3, H, W) -> two classes of each pixel (N, 2, H, W)."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512, 1024)) -> None:
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(i, o) for i, o in pairwise((3, *widths)))
        steps = [*pairwise(widths)][::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in steps)
        self.blocks = nn.ModuleList(DoubleConv(2 * i, i) for i, _ in steps)
        self.out = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for up, block in zip(self.up, self.blocks, strict=True):
            x = block(torch.cat([up(x), kept.pop()], 1))
        return self.out(x)


class ModulatedConv(nn.Module):
    """A convolution whose input channels are scaled by a style for each image, and whose filters
    have unit norm then; the images are groups of one convolution."""

    def __init__(self, i: int, o: int, k: int, style: int, is_demodulated: bool = True) -> None:
        super().__init__()
        self.style, self.is_demodulated = nn.Linear(style, i), is_demodulated
        self.weight = nn.Parameter(torch.randn(o, i, k, k) / math.sqrt(i * k * k))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        o, i, k, _ = self.weight.shape
        weight = self.weight * (self.style(style) + 1)[:, None, :, None, None]
        if self.is_demodulated:
            weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        images = x.shape[0]
        x = x.reshape(1, images * i, *x.shape[2:])
        x = F.conv2d(x, weight.reshape(images * o, i, k, k), padding=k // 2, groups=images)
        return x.reshape(images, o, *x.shape[2:])


class StyledLayer(nn.Module):
    """A modulated convolution, upsampled before or not, with noise, bias and leaky ReLU."""

    def __init__(self, i: int, o: int, style: int, size: int, upsamples: bool) -> None:
        super().__init__()
        self.conv, self.upsamples = ModulatedConv(i, o, 3, style), upsamples
        self.bias, self.strength = nn.Parameter(torch.zeros(o)), nn.Parameter(torch.ones(1))
        self.register_buffer("noise", torch.randn(size, size))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        if self.upsamples:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
        x = self.conv(x, style) + self.strength * self.noise
        return math.sqrt(2) * F.leaky_relu(x + self.bias[:, None, None], 0.2)


class StyleGAN2(nn.Module):
    """forward: styles (N, ``style``) -> images (N, 3, H, W), H = W = 4 * 2 ** (levels - 1)."""

    def __init__(
        self, widths: Sequence[int] = (512, 512, 512, 512, 512, 256, 128), style: int = 512
    ) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        self.layers, self.images = nn.ModuleList(), nn.ModuleList()
        i = widths[0]
        for level, o in enumerate(widths):
            size = 4 * 2**level
            layers = [StyledLayer(i, o, style, size, True)] if level else []
            self.layers.append(nn.ModuleList([*layers, StyledLayer(o, o, style, size, False)]))
            self.images.append(ModulatedConv(o, 3, 1, style, is_demodulated=False))
            i = o

    def forward(self, style: Tensor) -> Tensor:
        x = self.start.expand(len(style), -1, -1, -1)
        image: Tensor | None = None
        for layers, to_image in zip(self.layers, self.images, strict=True):
            for layer in layers:
                x = layer(x, style)
            y = to_image(x, style)
            if image is not None:
                y = y + F.interpolate(image, scale_factor=2.0, mode="bilinear")
            image = y
        return image


class DenseBlock(nn.Module):
    """Five convolutions, each of all earlier outputs, with a scaled shortcut."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        outputs = (growth, growth, growth, growth, channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(channels + n * growth, o, 3, padding=1) for n, o in enumerate(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        *convs, last = self.convs
        found = [x]
        for conv in convs:
            found.append(F.leaky_relu(conv(torch.cat(found, 1)), 0.2))
        return x + 0.2 * last(torch.cat(found, 1))


class ESRGAN(nn.Module):
    """forward: images (N, 3, H, W) -> images (N, 3, 4 H, 4 W)."""

    def __init__(self, channels: int = 64, growth: int = 32, depth: int = 23) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(DenseBlock(channels, growth) for _ in range(3))) for _ in range(depth)
        )
        self.body, self.up1, self.up2, self.last = (
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4)
        )
        self.out = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.conv_in(x)
        for block in self.blocks:
            x = x + 0.2 * block(x)
        x = first + self.body(x)
        for up in (self.up1, self.up2):
            x = F.leaky_relu(up(F.interpolate(x, scale_factor=2.0)), 0.2)
        return self.out(F.leaky_relu(self.last(x), 0.2))


def _sloped(i: int, o: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.PReLU(o))


class FlowBlock(nn.Module):
    """forward: images and known flows (N, C, H, W), of sizes divisible by ``4 * scale`` ->
    additions to the flows and to the mask (N, 5, H, W)."""

    def __init__(self, i: int, width: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        self.down = nn.Sequential(_sloped(i, width // 2, 2), _sloped(width // 2, width, 2))
        self.convs = nn.Sequential(*(_sloped(width, width) for _ in range(8)))
        self.out = nn.ConvTranspose2d(width, 5, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(F.interpolate(x, scale_factor=1 / self.scale, mode="bilinear"))
        x = self.out(x + self.convs(x))
        x = F.interpolate(x, scale_factor=2.0 * self.scale, mode="bilinear")
        flow, mask = x.split((4, 1), 1)
        return torch.cat((flow * self.scale, mask), 1)


class RIFE(nn.Module):
    """forward: two frames (N, 3, H, W) each -> the frame between them (N, 3, H, W)."""

    def __init__(self, widths: Sequence[int] = (240, 150, 90)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            FlowBlock(6 if level == 0 else 17, width, 2 ** (len(widths) - 1 - level))
            for level, width in enumerate(widths)
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        frames = torch.cat((first, second), 1)
        known = self.blocks[0](frames)
        for block in list(self.blocks)[1:]:
            known = known + block(torch.cat((frames, *self.warped(first, second, known), known), 1))
        one, other = self.warped(first, second, known)
        mask = torch.sigmoid(known[:, 4:])
        return one * mask + other * (1 - mask)

    def warped(self, first: Tensor, second: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both frames, moved by their flows, which are in pixels."""
        height, width = first.shape[2:]
        identity = torch.eye(2, 3, dtype=first.dtype, device=first.device)[None]
        grid = F.affine_grid(identity, [1, 3, height, width], align_corners=False)
        unit = known.new_tensor([2 / width, 2 / height])
        flows = known[:, :4].permute(0, 2, 3, 1)
        one, other = (
            F.grid_sample(frame, grid + flow * unit, padding_mode="border", align_corners=False)
            for frame, flow in ((first, flows[..., :2]), (second, flows[..., 2:]))
        )
        return one, other
