"""Random models: convolutions of one to three dimensions among what models have around them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_LINEAR_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
_CHANNELS = (1, 3, 4, 8, 16, 24, 32, 33)
_SIZES = {1: (20, 200), 2: (8, 32), 3: (6, 12)}
"""Least and most elements of a dimension of the input."""

Draw = random.Random


def _activation(draw: Draw) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        nn.Identity,
        nn.ReLU,
        lambda: nn.ReLU(inplace=True),
        nn.SiLU,
        nn.GELU,
        lambda: nn.GELU("tanh"),
        lambda: nn.LeakyReLU(draw.choice([0.01, 0.1, 0.2, 0.3])),
        nn.Hardswish,
        nn.ReLU6,
        nn.Sigmoid,
        nn.Mish,
        nn.PReLU,
    ]
    return draw.choice(kinds)()


def _batch_norm(draw: Draw, channels: int, dims: int) -> nn.Module:
    norm = _BATCH_NORMS[dims](
        channels,
        momentum=draw.choice([0.1, 0.3]),
        affine=draw.random() < 0.85,
        track_running_stats=draw.random() < 0.85,
        eps=draw.choice([1e-5, 1e-3]),
    )
    if norm.running_mean is not None and norm.running_var is not None:
        nn.init.normal_(norm.running_mean, 0, 0.3)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.3)
    return norm


def _norm(draw: Draw, channels: int, dims: int) -> nn.Module:
    groups = [count for count in (1, 2, 4, channels) if channels % count == 0]
    kinds: list[Callable[[], nn.Module]] = [
        *[lambda: _batch_norm(draw, channels, dims)] * 4,
        lambda: nn.GroupNorm(draw.choice(groups), channels),
        lambda: _INSTANCE_NORMS[dims](channels, track_running_stats=draw.random() < 0.3),
        nn.Identity,
        nn.Identity,
    ]
    return draw.choice(kinds)()


def _convolution(draw: Draw, inputs: int, outputs: int, dims: int, same: bool) -> nn.Module:
    """A convolution; with ``same``, its output has the size of its input."""
    window = draw.choice([1, 3, 3, 3, 5])
    stride = 1 if same else draw.choice([1, 1, 2])
    dilation = draw.choice([1, 1, 2]) if stride == 1 else 1
    groups = [count for count in (1, 2, 4, inputs) if inputs % count == outputs % count == 0]
    padding = dilation * (window - 1) // 2
    modes = ["zeros"] * 5 + ["reflect", "circular"]
    return CONVOLUTIONS[dims](
        inputs,
        outputs,
        window,
        stride,
        padding,
        dilation,
        draw.choice([1, *groups]),
        bias=draw.random() < 0.5,
        padding_mode=draw.choice(modes) if padding <= 2 else "zeros",
    )


class _Layer(nn.Sequential):
    """A convolution with a norm and an activation, one of them in front at times."""

    def __init__(
        self, draw: Draw, inputs: int, outputs: int, dims: int, same: bool = False
    ) -> None:
        convolution = _convolution(draw, inputs, outputs, dims, same)
        if draw.random() < 0.15:
            super().__init__(_norm(draw, inputs, dims), nn.SiLU(), convolution)
        else:
            norm = _norm(draw, outputs, dims)
            super().__init__(convolution, norm, _activation(draw))


class _Residual(nn.Module):
    def __init__(self, draw: Draw, channels: int, dims: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _Layer(draw, channels, channels, dims, same=True),
            _convolution(draw, channels, channels, dims, same=True),
            _norm(draw, channels, dims),
        )
        self.gate = CONVOLUTIONS[dims](channels, channels, 1)
        self.scale = nn.Parameter(torch.rand(channels))
        self.activation = _activation(draw)
        self.kind = draw.randrange(6)

    def forward(self, input: Tensor) -> Tensor:
        output = self.body(input)
        ones = [1] * (input.dim() - 2)
        if self.kind == 0:
            return self.activation(input + output)
        if self.kind == 1:
            return self.activation(output + input) * 0.5
        if self.kind == 2:
            return self.activation(output.add(input, alpha=0.7)) - input
        if self.kind == 3:
            means = input.mean(tuple(range(2, input.dim())), keepdim=True)
            return self.activation(input + output * self.gate(means).sigmoid())
        if self.kind == 4:
            return self.activation(output * self.scale.view(-1, *ones) + input)
        return self.activation(output) * input


class _Concatenation(nn.Module):
    def __init__(self, draw: Draw, inputs: int, outputs: int, dims: int) -> None:
        super().__init__()
        more = draw.choice([1, 4, 8])
        self.first = _Layer(draw, inputs, more, dims, same=True)
        self.is_behind = draw.random() < 0.5
        self.second = _Layer(draw, inputs + more, outputs, dims, same=True)

    def forward(self, input: Tensor) -> Tensor:
        more = self.first(input)
        return self.second(torch.cat([input, more] if self.is_behind else [more, input], 1))


class _Padded(nn.Module):
    """A pad in front of a convolution, and frames in front of that at times."""

    def __init__(self, draw: Draw, inputs: int, outputs: int, dims: int) -> None:
        super().__init__()
        window = draw.choice([2, 3])
        self.pad = [draw.choice([0, 1, 1, 2, -1]) for _ in range(2 * dims)]
        self.value = draw.choice([0.0, 0.0, 0.0, 1.5])
        self.mode = draw.choice(["constant"] * 5 + ["replicate"])
        self.has_cache, self.is_shared = draw.random() < 0.2, draw.random() < 0.2
        self.layer = nn.Sequential(
            CONVOLUTIONS[dims](inputs, outputs, window, draw.choice([1, 2])),
            _norm(draw, outputs, dims),
            _activation(draw),
        )

    def forward(self, input: Tensor) -> Tensor:
        if self.has_cache:
            input = torch.cat([input[:, :, -1:], input], 2)
        if self.mode == "constant":
            padded = F.pad(input, self.pad, value=self.value)
        else:
            padded = F.pad(input, [max(0, width) for width in self.pad], mode=self.mode)
        output = self.layer(padded)
        return output * padded.mean().sigmoid() if self.is_shared else output


class _Upsampled(nn.Module):
    def __init__(self, draw: Draw, inputs: int, outputs: int, dims: int) -> None:
        super().__init__()
        mode = draw.choice(["nearest", "nearest", "nearest-exact", _LINEAR_MODES[dims]])
        scale = draw.choice([2, 2, 3, 1.5])
        kind = draw.randrange(4)
        if kind == 0:
            first: nn.Module = _TRANSPOSED[dims](inputs, outputs, 4, 2, 1)
        elif kind == 1 and dims == 2:
            first = nn.Sequential(nn.Conv2d(inputs, 4 * outputs, 3, 1, 1), nn.PixelShuffle(2))
        else:
            upsample = nn.Upsample(scale_factor=scale, mode=mode)
            first = nn.Sequential(upsample, _convolution(draw, inputs, outputs, dims, same=True))
        self.layer = nn.Sequential(first, _norm(draw, outputs, dims), _activation(draw))

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input)


class _Parts(nn.Module):
    """Views and pools of what a convolution reads or gives."""

    def __init__(self, draw: Draw, channels: int, dims: int) -> None:
        super().__init__()
        self.convolution = _convolution(draw, channels, channels, dims, same=True)
        self.kind, self.dims = draw.randrange(6), dims

    def forward(self, input: Tensor) -> Tensor:
        output = self.convolution(input)
        if self.kind == 0:
            return _MAX_POOLS[self.dims](output, 2)
        if self.kind == 1:
            return output[..., 1:]
        if self.kind == 2:
            return output + self.convolution(output.relu())
        if self.kind == 3 and output.shape[1] % 2 == 0:
            first, second = output.chunk(2, 1)
            return torch.cat([first * second.sigmoid(), first], 1)
        if self.kind == 4 and output.shape[1] % 2 == 0:
            return output.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return output - output.mean(1, keepdim=True)


class RandomModel(nn.Module):
    """A model of two to four blocks, whose forward returns a list of outputs.

    Attributes:
        input: an input of it, of shape ``(N, C, ...)``, float32, on the CPU.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        dims = draw.choice([1, 2, 2, 2, 3])
        channels = draw.choice([1, 3, 4, 8, 16])
        size = [draw.randint(*_SIZES[dims]) for _ in range(dims)]
        self.input = torch.randn(draw.choice([1, 2, 3, 8]), channels, *size)
        self.blocks = nn.ModuleList()
        for _ in range(draw.randint(2, 4)):
            outputs = draw.choice(_CHANNELS)
            kind = draw.choice([_Layer, _Layer, _Concatenation, _Padded, _Upsampled])
            block: nn.Module = kind(draw, channels, outputs, dims)
            if draw.random() < 0.3:
                outputs = channels
                block = draw.choice([_Residual, _Parts])(draw, channels, dims)
            self.blocks.append(block)
            channels = outputs
        self.head = nn.Linear(channels, 5)
        self.is_dense, self.gives_all = draw.random() < 0.5, draw.random() < 0.4
        if draw.random() < 0.2:
            self.blocks[0].requires_grad_(False)

    def forward(self, input: Tensor) -> list[Tensor]:
        found = []
        for block in self.blocks:
            input = block(input)
            found.append(input)
        last = input if self.is_dense else self.head(input.flatten(2).mean(2))
        return [*found[:-1], last] if self.gives_all else [last]


def random_model(seed: int) -> RandomModel:
    """A model that PyTorch can train with its input; the same for the same seed."""
    torch.manual_seed(seed)
    draw = Draw(seed)
    while True:
        model = RandomModel(draw)
        try:  # a window or a norm may need more elements than are left
            results(copy.deepcopy(model), model.input, training=True)
        except (RuntimeError, ValueError):
            continue
        return model


def results(
    model: nn.Module,
    input: Tensor,
    training: bool,
    call: Callable[[Tensor], list[Tensor]] | None = None,
    autocast: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The outputs of a step by ``call``, and in training all gradients and buffers by name."""
    model.train(training)
    input = input.detach().requires_grad_(training)
    model.zero_grad(set_to_none=True)
    with (
        torch.set_grad_enabled(training),
        torch.autocast(input.device.type, autocast, enabled=autocast is not None),
    ):
        outputs = (model if call is None else call)(input)
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    if training:
        torch.manual_seed(0)
        weights = [torch.randn(output.shape, dtype=torch.float64) for output in outputs]
        pairs = zip(outputs, weights, strict=True)
        sum((a.double() * b.to(a.device)).mean() for a, b in pairs).backward()
        gradients = {name: p.grad for name, p in [*model.named_parameters(), ("input", input)]}
        found |= {f"gradient of {k}": g.clone() for k, g in gradients.items() if g is not None}
        found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found
