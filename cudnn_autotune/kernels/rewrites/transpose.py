"""Tensors in the other memory format: transposed (channels, pixels) matrices of each image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.recipe import Address, Argument, Kernel, KernelLaunch
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.rewrites.division import divisor

_SOURCE = sources.source(__package__, "division.cuh", "several_tensors.cuh", "transpose.cu")
_VECTOR_BYTES = 16
LEAST_ALIGNED = _VECTOR_BYTES
"""Alignment of every tensor in bytes."""
_TILE_BYTES = 16 << 10
_THREADS = 256
_ITEMS = 4
"""Simultaneous loads of a thread."""
_BLOCKS = 5
"""Least resident blocks of a multiprocessor, by their registers."""
_VECTORS_DOWN = 8
"""Vectors along a column of a tile, if it is part of the target's column: whole lines, one vector
for each group of four banks."""
_ODD_VECTORS_DOWN = 16
"""The same, if columns of the target are no whole vectors, so that there are few ends."""


@dataclass(frozen=True)
class Transposition:
    """A transposition of each image, from a dense matrix (rows, columns) to (columns, rows)."""

    source: Address
    target: Address
    """The targets' address; both have an alignment of ``LEAST_ALIGNED`` bytes."""
    images: int
    rows: int
    columns: int


def is_same(shape: Sequence[int]) -> bool:
    """Returns whether a tensor (images, channels, \\*spatial) lies alike in both memory formats."""
    return shape[1] == 1 or math.prod(shape[2:]) == 1


def to_channels_last(shape: Sequence[int], source: Address, target: Address) -> Transposition:
    """Returns the copy of a contiguous tensor (images, channels, \\*spatial)."""
    return Transposition(source, target, shape[0], shape[1], math.prod(shape[2:]))


def to_contiguous(shape: Sequence[int], source: Address, target: Address) -> Transposition:
    """Returns the copy of a tensor (images, channels, \\*spatial) in channels_last."""
    return Transposition(source, target, shape[0], math.prod(shape[2:]), shape[1])


def transpose(transpositions: Sequence[Transposition], dtype: torch.dtype) -> KernelLaunch:
    """Returns the launch that writes one to three targets, of elements of 2 or 4 bytes."""
    vector = _VECTOR_BYTES // dtype.itemsize
    tiles = [_tile(t, vector) for t in transpositions]
    defines = {
        "ELEMENT_BYTES": dtype.itemsize,
        "TENSORS": len(transpositions),
        "THREADS": _THREADS,
        "ITEMS": _ITEMS,
        "BLOCKS": _BLOCKS,
    }
    return KernelLaunch(
        Kernel(_SOURCE, "transpose", tuple(defines.items())),
        (sum(tile.blocks for tile in tiles), 1, 1),
        (_THREADS, 1, 1),
        tuple(a for tile in tiles for a in tile.arguments()),
        shared_bytes=max(tile.shared_elements for tile in tiles) * dtype.itemsize,
    )


@dataclass(frozen=True)
class _Tile:
    """The elements of a block: part of an image, or some whole images."""

    whole: Transposition
    vector: int
    images: int
    rows: int
    columns: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tiles along images, rows and columns."""
        t = self.whole
        return (
            -(-t.images // self.images),
            -(-t.rows // self.rows),
            -(-t.columns // self.columns),
        )

    @property
    def blocks(self) -> int:
        return math.prod(self.counts)

    @property
    def has_whole_vectors(self) -> bool:
        """Whether every row of the source begins at a vector."""
        return self.whole.columns % self.vector == 0

    @property
    def reads_rows(self) -> bool:
        """Whether the tile's rows are segments of the source; else they are one together."""
        return self.has_whole_vectors or self.columns < self.whole.columns

    @property
    def writes_columns(self) -> bool:
        return self.rows < self.whole.rows

    @property
    def pitch(self) -> int:
        """Elements between rows in shared memory, with vectors in the source's order."""
        if not self.reads_rows:
            return self.columns
        return self.columns + (self.whole.columns - self.columns) % self.vector

    @property
    def shared_elements(self) -> int:
        rows = self.images * self.rows
        return self.vector + rows * self.pitch + self.has_whole_vectors * rows

    def _slots(self, length: int, is_aligned: bool) -> int:
        """Returns the most vectors with elements of a segment."""
        return -(-(length if is_aligned else length + self.vector - 1) // self.vector)

    def arguments(self) -> tuple[Argument, ...]:
        t, elements = self.whole, self.images * self.rows * self.columns
        source_slots = self._slots(
            self.columns if self.reads_rows else elements, self.has_whole_vectors
        )
        is_aligned = t.rows % self.vector == 0
        target_slots = self._slots(self.rows if self.writes_columns else elements, is_aligned)
        _, tiles_down, tiles_across = self.counts
        return (
            *(t.target, t.source, self.blocks, t.images, divisor(t.rows), divisor(t.columns)),
            *(self.images, self.rows, self.columns),
            *(divisor(tiles_down), divisor(tiles_across)),
            *(divisor(source_slots), divisor(target_slots)),
            *(int(self.reads_rows), int(self.writes_columns)),
            *(self.pitch, -self.vector if self.has_whole_vectors else 0),
        )


def _tile(t: Transposition, vector: int) -> _Tile:
    capacity = _TILE_BYTES // _VECTOR_BYTES * vector
    if 2 * t.rows * t.columns <= capacity:
        images = min(t.images, capacity // (t.rows * t.columns))
        return _Tile(t, vector, images, t.rows, t.columns)
    of_few_columns = capacity // (4 * t.columns) // vector * vector
    if t.rows % vector == 0:
        rows = min(t.rows, max(_VECTORS_DOWN * vector, of_few_columns))
    elif 32 * t.rows <= capacity:
        rows = t.rows
    else:
        rows = min(t.rows, max(_ODD_VECTORS_DOWN * vector, of_few_columns))
    sectors = 2 * vector
    if t.columns % vector and t.columns * sectors <= capacity:
        # Several rows together are whole vectors.
        rows = min(rows, capacity // t.columns // sectors * sectors)
        return _Tile(t, vector, 1, rows, t.columns)
    parts = -(-t.columns // (capacity // rows // sectors * sectors))
    columns = -(-t.columns // (parts * sectors)) * sectors
    return _Tile(t, vector, 1, rows, min(columns, t.columns))
