"""Tensors in a packed form: a pixel's channels hold several pixels, padded with zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.recipe import Address, Argument, Int64, Kernel, KernelLaunch
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.rewrites.division import divisor

_SOURCE = "".join(
    sources.text(__package__, name)
    for name in ("division.cuh", "several_tensors.cuh", "packing.cu")
)
_THREADS = 256
_WIDEST = 16
"""Bytes of the widest load and store."""
LEAST_ALIGNED = _WIDEST
"""Alignment of every tensor in bytes."""
_BYTES_OF_A_THREAD = 32
_MOST_ITEMS = 8


def pair(values: Sequence[int]) -> tuple[int, int]:
    """Returns a height and a width as a pair, for type checkers."""
    height, width = values
    return height, width


@dataclass(frozen=True)
class Packing:
    """The places of a plain tensor's pixels in a packed one, as in packing.cu.

    Sizes are in elements. Pairs are height and width.
    """

    images: int
    size: tuple[int, int]
    """Height and width of the plain tensor."""
    channels: int
    run: int
    """Elements of a packed pixel from one plain row: ``phases[1] * channels``, and zeros."""
    packed_images: int
    packed_size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    phases: tuple[int, int] = (1, 1)
    """Rows and columns of plain pixels in a packed one."""
    offset: tuple[int, int] = (0, 0)
    limit: tuple[int, int] | None = None
    """Row and column from which plain pixels are zero in both forms; None: all count."""

    @property
    def is_flat(self) -> bool:
        """Whether an image is one pixel in both forms."""
        return self == Packing(
            *(self.images, (1, 1), self.channels, self.run, self.packed_images, (1, 1))
        )

    @property
    def stretch(self) -> int:
        """A run's elements of a plain row are adjacent. Their begin and their number are multiples
        of this number of elements."""
        limit = self.size if self.limit is None else self.limit
        widths = (self.stride[1], self.phases[1], self.offset[1], self.size[1], limit[1])
        return self.channels * math.gcd(*widths)

    @property
    def packed_count(self) -> int:
        """Elements of the packed tensor."""
        return self.packed_images * math.prod(self.packed_size) * self.phases[0] * self.run


@dataclass(frozen=True)
class Copy:
    """A tensor in both forms, each at a multiple of ``LEAST_ALIGNED`` bytes."""

    packing: Packing
    plain: Address
    packed: Address


def pack(copies: Sequence[Copy], dtype: torch.dtype) -> KernelLaunch:
    """Returns the launch that writes the packed tensors, one to three."""
    return _launch(copies, dtype, is_pack=True)


def unpack(copies: Sequence[Copy], dtype: torch.dtype) -> KernelLaunch:
    """Returns the launch that writes the plain tensors, one to three."""
    return _launch(copies, dtype, is_pack=False)


def _launch(copies: Sequence[Copy], dtype: torch.dtype, *, is_pack: bool) -> KernelLaunch:
    size = dtype.itemsize
    runs = math.gcd(*(c.packing.run for c in copies), _WIDEST // size)
    stretches = (c.packing.stretch if is_pack else c.packing.channels for c in copies)
    plain = math.gcd(*stretches, _WIDEST // size)
    vector = runs if is_pack else plain
    load = math.gcd(vector, plain, runs)
    items = min(_MOST_ITEMS, _BYTES_OF_A_THREAD // (vector * size))
    defines = {
        "ELEMENT_BYTES": size,
        "TENSORS": len(copies),
        "PACK": int(is_pack),
        "FLAT": sum(c.packing.is_flat << n for n, c in enumerate(copies)),
        "VECTOR": vector,
        "LOAD": load,
        "ITEMS": items,
        "THREADS": _THREADS,
    }
    vectors = [_target_count(c.packing, is_pack) // vector for c in copies]
    return KernelLaunch(
        Kernel(_SOURCE, "copy_tensors", tuple(defines.items())),
        (sum(-(-v // (_THREADS * items)) for v in vectors), 1, 1),
        (_THREADS, 1, 1),
        tuple(a for c in copies for a in _arguments(c, vector, is_pack)),
    )


def _target_count(p: Packing, is_pack: bool) -> int:
    return p.packed_count if is_pack else p.images * math.prod(p.size) * p.channels


def _arguments(copy: Copy, vector: int, is_pack: bool) -> list[Argument]:
    p = copy.packing
    packed_channels = p.phases[0] * p.run
    target, source = (copy.packed, copy.plain) if is_pack else (copy.plain, copy.packed)
    target_size = p.packed_size if is_pack else p.size
    source_size, pixel = (p.size, p.channels) if is_pack else (p.packed_size, packed_channels)
    limit = p.size if p.limit is None else p.limit
    return [
        target,
        source,
        _target_count(p, is_pack) // vector,
        divisor((p.run if is_pack else p.channels) // vector),
        divisor(p.phases[0] if is_pack else 1),
        divisor(target_size[1]),
        divisor(target_size[0]),
        p.images,
        min(limit[0], p.size[0]),
        min(limit[1], p.size[1]),
        *p.offset,
        divisor(p.stride[0]),
        divisor(p.stride[1]),
        *p.phases,
        p.channels,
        p.run,
        pixel,
        Int64(source_size[1] * pixel),
        Int64(math.prod(source_size) * pixel),
    ]
