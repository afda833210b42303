"""Random convolutions: their shapes, operands, and results in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import cudnn_autotune as ca
from support.conv.references import relative_error, tolerance

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
}
# Where a tensor lies: as it is allocated, one element behind an aligned address, in every second
# place of a larger one.
PLACEMENTS = ("plain", "offset", "strided")
_MOST_PRODUCTS = 2**24  # so that the reference takes milliseconds


@dataclass(frozen=True)
class RandomShape:
    """A call of ``F.conv1d`` to ``F.conv_transpose3d``. Its repr makes it again."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    dtype: str
    output_padding: tuple[int, ...] | None = None  # of a transposed convolution
    bias: bool = False
    channels_last: tuple[bool, bool, bool] = (False, False, False)  # input, weight, gradient
    placement: str = "plain"
    seed: int = 0

    @property
    def dims(self) -> int:
        return len(self.stride)

    @property
    def output(self) -> tuple[int, ...]:
        """The size of the output; entries below 1 where the kernel does not fit."""
        size = [self.input[0], self.weight[0]]
        if self.output_padding is not None:
            size[1] = self.weight[1] * self.groups
        for d in range(self.dims):
            reach = self.dilation[d] * (self.weight[2 + d] - 1)
            padding = 0 if isinstance(self.padding, str) else 2 * self.padding[d]
            if self.output_padding is not None:
                steps = (self.input[2 + d] - 1) * self.stride[d]
                size.append(steps - padding + reach + self.output_padding[d] + 1)
            elif self.padding == "same":
                size.append(self.input[2 + d])
            else:
                size.append((self.input[2 + d] + padding - reach - 1) // self.stride[d] + 1)
        return tuple(size)

    @property
    def products(self) -> int:
        pixels = self.input if self.output_padding is not None else self.output
        return pixels[0] * math.prod(pixels[2:]) * math.prod(self.weight)

    def call(
        self, function: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        if self.output_padding is None:
            return function(
                input, weight, bias, self.stride, self.padding, self.dilation, self.groups
            )
        return function(
            input,
            weight,
            bias,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )

    @property
    def name(self) -> str:
        """Of the function in ``torch.nn.functional`` and in ``cudnn_autotune.functional``."""
        return f"conv{'' if self.output_padding is None else '_transpose'}{self.dims}d"


def random_shape(generator: random.Random) -> RandomShape:
    """A shape with an output, and not too much to compute."""
    while True:
        shape = _any_shape(generator)
        if min(shape.output) >= 1 and shape.products <= _MOST_PRODUCTS:
            return shape


def _any_shape(rng: random.Random) -> RandomShape:
    dims = rng.choice((1, 2, 2, 2, 3))
    transposed = rng.random() < 0.25

    def each(low: int, high: int) -> tuple[int, ...]:
        if rng.random() < 0.5:
            return (rng.randint(low, high),) * dims
        return tuple(rng.randint(low, high) for _ in range(dims))

    groups = rng.choice((1, 1, 1, 2, 3, 4, 8))
    # Multiples of 8 are what tensor cores like; 1 on both sides is a depthwise convolution.
    per_group = [rng.choice((1, 3, 4, 8, 16, rng.randint(1, 20))) for _ in range(2)]
    if rng.random() < 0.2:
        groups, per_group = rng.choice((4, 8, 16, 24)), [1, rng.choice((1, 1, 2))]
    ins, outs = per_group[0] * groups, per_group[1] * groups
    kernel = each(1, {1: 9, 2: 5, 3: 3}[dims]) if rng.random() < 0.8 else (1,) * dims
    stride = each(1, 3) if rng.random() < 0.5 else (1,) * dims
    dilation = each(1, 3) if rng.random() < 0.3 else (1,) * dims
    padding: tuple[int, ...] | str = each(0, 3) if rng.random() < 0.7 else (0,) * dims
    if not transposed and rng.random() < 0.15:
        padding, stride = "same", (1,) * dims
    output_padding = tuple(rng.randint(0, s - 1) for s in stride) if transposed else None
    size = each(1, {1: 120, 2: 24, 3: 10}[dims])
    return RandomShape(
        input=(rng.choice((1, 2, 3, 4, 8)), ins, *size),
        weight=((ins, per_group[1]) if transposed else (outs, per_group[0])) + kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=rng.choice(tuple(DTYPES)),
        output_padding=output_padding,
        bias=rng.random() < 0.5,
        channels_last=tuple(rng.random() < 0.4 for _ in range(3)),
        placement=rng.choice(PLACEMENTS) if rng.random() < 0.4 else "plain",
        seed=rng.randrange(2**31),
    )


def _placed(tensor: Tensor, channels_last: bool, placement: str) -> Tensor:
    if channels_last and tensor.dim() > 3:
        layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        tensor = tensor.contiguous(memory_format=layout)
    if placement == "offset":
        room = tensor.new_zeros(tensor.numel() + 1)
        return room[1:].as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)
    if placement == "strided":
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return tensor


def operands(shape: RandomShape, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Input, weight, bias, gradient of the output: standard normal."""
    generator = torch.Generator().manual_seed(shape.seed)

    def normal(size: Sequence[int]) -> Tensor:
        values = torch.randn(tuple(size), generator=generator, dtype=torch.float32)
        return values.to(device, DTYPES[shape.dtype])

    sizes = (shape.input, shape.weight, shape.output)
    input, weight, gradient = (
        _placed(normal(size), last, shape.placement)
        for size, last in zip(sizes, shape.channels_last, strict=True)
    )
    return input, weight, normal(shape.output[1:2]) if shape.bias else None, gradient


def results(
    shape: RandomShape,
    function: Callable[..., Tensor],
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor],
) -> dict[str, Tensor]:
    """The output, and the gradients of input, weight and bias."""
    wanted = [t.detach().requires_grad_() for t in tensors[:3] if t is not None]
    output = shape.call(function, wanted[0], wanted[1], wanted[2] if shape.bias else None)
    gradients = torch.autograd.grad(output, wanted, tensors[3])
    names = ("output", "input's gradient", "weight's gradient", "bias's gradient")
    return dict(zip(names, (output, *gradients), strict=False))


def errors(
    shape: RandomShape, device: str, function: Callable[..., Tensor] | None = None
) -> list[str]:
    """What is wrong with ``function``'s results, else with those of ``cudnn_autotune.functional``;
    a line each.

    A result may differ from that in float64 on the CPU by the tolerance of its dtype, relative to
    its norm, or to what the norm of a sum of as many random products is expected to be.
    """
    tensors = operands(shape, device)
    exact = tuple(None if t is None else t.cpu().double().contiguous() for t in tensors)
    expected = results(shape, getattr(F, shape.name), exact)
    actual = results(shape, function or getattr(ca.functional, shape.name), tensors)
    taps = math.prod(shape.weight[2:])
    channels = shape.weight[0] // shape.groups, shape.weight[1]
    pixels = shape.output[0] * math.prod(shape.output[2:])
    sums = {
        "output": taps * channels[shape.output_padding is None],
        "input's gradient": taps * channels[shape.output_padding is not None],
        "weight's gradient": pixels,
        "bias's gradient": pixels,
    }
    allowed = tolerance(DTYPES[shape.dtype], allow_tf32=shape.dtype == "tf32")
    found = []
    for name, ours in actual.items():
        right = expected[name]
        norm = right.norm().item()
        typical = math.sqrt(right.numel() * sums[name])
        error = relative_error(ours, right) * (norm or 1.0) / max(norm, typical)
        if ours.dtype is not DTYPES[shape.dtype] or not error <= allowed:
            found.append(f"{name}: relative error {error:.3g}, allowed {allowed:.3g}; {shape}")
    return found
