"""Random convolutions of kinds that are rare in the audits: 1-d, 3-d, transposed, grouped."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("1-d", "3-d", "transposed", "grouped")
OPS = ("forward", "dgrad", "wgrad")
DTYPES = ("float16", "bfloat16", "float32")
# Multiplications and additions of a call, and bytes of its three tensors.
_FLOPS = (2e7, 6e10)
_DRY_FLOPS = (0.0, 2e6)
_MOST_BYTES = 6e8
_CHANNELS = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024)
_DRY_CHANNELS = (4, 8)


@dataclass(frozen=True)
class Layer:
    """One call of ``aten::convolution``, or of one half of its backward."""

    kind: str
    op: str
    """``forward``, or the gradient that is computed: ``dgrad``, ``wgrad``."""
    dtype: str
    channels_last: bool
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool

    @property
    def spatial_dims(self) -> int:
        return len(self.stride)

    @property
    def output_shape(self) -> tuple[int, ...]:
        taken = zip(
            self.input_shape[2:],
            self.weight_shape[2:],
            self.stride,
            self.padding,
            self.dilation,
            strict=True,
        )
        if self.transposed:
            channels = self.weight_shape[1] * self.groups
            size = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in taken]
        else:
            channels = self.weight_shape[0]
            size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in taken]
        return (self.input_shape[0], channels, *size)

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        images = self.input_shape if self.transposed else self.output_shape
        return 2.0 * math.prod(self.weight_shape) * images[0] * math.prod(images[2:])

    @property
    def bytes(self) -> float:
        """Bytes of input, weight and output together."""
        elements = map(math.prod, (self.input_shape, self.weight_shape, self.output_shape))
        return sum(elements) * (4.0 if self.dtype == "float32" else 2.0)

    @property
    def text(self) -> str:
        """A line that names it."""

        def sizes(values: tuple[int, ...]) -> str:
            return "x".join(map(str, values))

        parts = [self.kind, self.op, self.dtype, "last" if self.channels_last else "first"]
        parts += [sizes(self.input_shape), sizes(self.weight_shape), f"s{sizes(self.stride)}"]
        parts += [f"p{sizes(self.padding)}", f"d{sizes(self.dilation)}", f"g{self.groups}"]
        return " ".join(parts)


# The layer that was found to be slower than by PyTorch.
FOUND = Layer(
    kind="3-d",
    op="forward",
    dtype="bfloat16",
    channels_last=True,
    input_shape=(1, 384, 2, 120, 208),
    weight_shape=(384, 384, 3, 3, 3),
    stride=(1, 1, 1),
    padding=(1, 1, 1),
    dilation=(1, 1, 1),
    groups=1,
    transposed=False,
)


def draw(count: int, seed: int, kinds: Sequence[str] = KINDS, is_dry: bool = False) -> list[Layer]:
    """Returns ``count`` layers, the kinds in turns; the first is the slow one found earlier.

    Args:
        is_dry: tiny layers, for a CPU.
    """
    source = random.Random(seed)
    least, most = _DRY_FLOPS if is_dry else _FLOPS
    found = [FOUND] if count > 0 and "3-d" in kinds and not is_dry else []
    while len(found) < count:
        layer = _draw(source, kinds[len(found) % len(kinds)], is_dry)
        if least <= layer.flops <= most and layer.bytes <= _MOST_BYTES:
            found.append(layer)
    return found


def _draw(source: random.Random, kind: str, is_dry: bool) -> Layer:
    dims = {"1-d": 1, "3-d": 3, "grouped": 2}.get(kind) or source.choice((1, 2, 2, 3))
    most = 3 if is_dry else {1: 14, 2: 8, 3: 6}[dims]
    size = [round(2 ** source.uniform(2, most)) for _ in range(dims)]
    if dims == 3:
        size[0] = source.choice((1, 2, 4) if is_dry else (1, 2, 4, 8, 16, 32))
    dilation = source.choice((1, 1, 1, 1, 2))
    if kind == "transposed":
        kernel, stride = source.choice(((2, 2), (4, 2), (3, 2), (3, 1), (4, 4), (8, 4)))
        padding, dilation = (kernel - stride + 1) // 2, 1
    else:
        kernel = source.choice((1, 3, 3, 3, 5, 7) if dims < 3 else (1, 3, 3, 3, 5))
        stride = source.choice((1, 1, 1, 2))
        padding = dilation * (kernel // 2)
    kernels = [kernel] * dims
    if kind == "3-d" and source.random() < 0.3:  # as in factorised networks
        kernels = source.choice(([1, kernel, kernel], [kernel, 1, 1]))
    paddings = [padding if k == kernel else 0 for k in kernels]
    known = _DRY_CHANNELS if is_dry else _CHANNELS
    channels, filters = source.choice(known), source.choice(known)
    groups = 1
    if kind == "grouped":
        groups = source.choice((2, 4, 8, 16, 32, channels))
        filters = channels
    elif source.random() < 0.1:
        channels = source.choice((1, 3, 4))
    while channels % groups or filters % groups:
        groups //= 2
    first, second = (channels, filters) if kind == "transposed" else (filters, channels)
    op = source.choice(OPS)
    return Layer(
        kind=kind,
        op=op,
        dtype=source.choice(DTYPES),
        channels_last=dims > 1 and source.random() < 0.5,
        input_shape=(
            source.choice((1, 1, 2) if is_dry else (1, 1, 2, 4, 8, 16, 32)),
            channels,
            *size,
        ),
        weight_shape=(first, second // groups, *kernels),
        stride=(stride,) * dims,
        padding=tuple(paddings),
        dilation=(dilation,) * dims,
        groups=groups,
        transposed=kind == "transposed",
    )
