"""Tiles of depthwise convolutions with pixels in shared memory: offers of ``depthwise``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.depthwise.depthwise_sizes import Dimension, Layer, added
from cudnn_autotune.kernels.family import INT32_MAX, MMA_CAPABILITY, epilogue_macros, operands
from cudnn_autotune.kernels.sources import ELEMENTS, source

_VECTOR_BYTES = 16
_SECTOR = 32
_BLOCK_BYTES = range(48, 208, 16)  # bytes of the channels of a pixel
_BLOCK_THREADS = range(64, 257)
_MOST_COLUMNS = 8
_MOST_FILTER_REGISTERS = 64
_MOST_TAPS_OF_STRIDE_ONE = 9  # beyond, tensor cores are faster in the half types
_MOST_REGISTERS = 168  # per thread
_OTHER_REGISTERS = 32
_MOST_SHARED_BYTES = 96 << 10
_MOST_PIXELS = 1 << 30  # per image, since the kernel counts them in 32 bits
_MOST_OFFERS = 4
# Constants of the estimate that orders the tiles, in clocks of a multiprocessor.
_COPY_INSTRUCTIONS = 16
_STEP_INSTRUCTIONS = 20
_BYTES_A_CLOCK = 20
_BLOCK_LATENCY = 2500
_BUSY_WARPS = 12  # enough for one instruction a clock in each scheduler


_Numbers = Any
"""An int or a float of one tile, or an array of those of many tiles."""


@dataclass(frozen=True)
class BlockTile:
    """The output pixels of one block, which are the settings of an offer; or many such tiles, with
    arrays of columns, rows and threads."""

    layer: Layer
    gpu: Gpu
    channels: int
    """Channels per thread."""
    groups: int
    """The groups of channels of a block."""
    columns: _Numbers
    """Columns of y per thread; dgrad writes ``stride`` times as many of x."""
    rows: _Numbers
    tile_threads: tuple[_Numbers, _Numbers]
    """Threads of a block along the rows and along the columns."""

    @property
    def settings(self) -> str:
        return (
            f"TILE={self.rows * self.tile_threads[0]}x{self.columns * self.tile_threads[1]},"
            f"GROUPS={self.groups},CHANNELS={self.channels},COLUMNS={self.columns},ROWS={self.rows}"
        )

    @property
    def threads(self) -> _Numbers:
        return self.groups * math.prod(self.tile_threads)

    @property
    def size(self) -> tuple[_Numbers, _Numbers]:
        return self.rows * self.tile_threads[0], self.columns * self.tile_threads[1]

    @property
    def chunks(self) -> int:
        """Number of channel chunks."""
        return -(-self.layer.channels // (self.groups * self.channels))

    @property
    def tiles(self) -> tuple[_Numbers, _Numbers]:
        lengths = self.layer.lengths
        return -(-lengths[0] // self.size[0]), -(-lengths[1] // self.size[1])

    @property
    def blocks(self) -> _Numbers:
        return self.layer.images * self.chunks * math.prod(self.tiles)

    def _read(self, units: _Numbers, d: Dimension) -> _Numbers:
        """Returns the pixels read for a number of units (pixels of y or groups of x)."""
        if self.layer.op == "fprop":
            return (units - 1) * d.stride + d.taps
        return units + -(-d.taps // d.stride) - 1

    @property
    def pixels_read(self) -> _Numbers:
        return self._read(self.size[0], self.layer.height) * self._read(
            self.size[1], self.layer.width
        )

    @property
    def window(self) -> _Numbers:
        return self._read(self.columns, self.layer.width)

    @property
    def _written(self) -> _Numbers:
        """Pixels of a step."""
        s = self.layer
        return self.columns * (1 if s.op == "fprop" else s.height.stride * s.width.stride)

    @property
    def shared_bytes(self) -> _Numbers:
        values = self.pixels_read + self.layer.taps
        return self.layer.itemsize * self.groups * self.channels * values

    @property
    def registers(self) -> _Numbers:
        """Registers per thread, estimated."""
        values = self.layer.taps + self.layer.slots * self._written
        return -(-(self.channels * values + _OTHER_REGISTERS) // 8) * 8

    @property
    def residents(self) -> _Numbers:
        """Blocks of a multiprocessor."""
        of_registers = self.gpu.sm_registers // (-(-self.threads // 32) * 32 * self.registers)
        of_threads = self.gpu.sm_threads // self.threads
        most = np.minimum(np.maximum(1, of_registers), of_threads)
        return np.minimum(most, self._shared_residents)

    @property
    def _shared_residents(self) -> _Numbers:
        of_a_block = self.shared_bytes + self.gpu.reserved_shared_bytes
        return np.maximum(1, self.gpu.shared_bytes // of_a_block)

    @property
    def _instructions(self) -> _Numbers:
        """Instructions of all warps of a block."""
        s = self.layer
        rows_read = min(s.height.stride, s.height.taps) if s.op == "fprop" else 1
        step = (
            _STEP_INSTRUCTIONS
            + rows_read * self.window * (1 + self.channels)
            + s.taps * self.columns * self.channels
            + self._written * (4 + self.channels)
        )
        copies = self.pixels_read * self.groups * self.channels * s.itemsize // _VECTOR_BYTES
        of_thread = (
            (self.rows + s.slots - 1) * step
            + 2 * s.taps * self.channels
            + _COPY_INSTRUCTIONS * copies / self.threads
            + 100
        )
        return of_thread * -(-self.threads // 32)

    def clocks(self) -> _Numbers:
        """Estimates the clocks of the busiest multiprocessor."""
        blocks = -(-self.blocks // self.gpu.multiprocessors)
        warps = self.residents * self.threads / 32
        issue = blocks * self._instructions / 4 / np.minimum(1.0, warps / _BUSY_WARPS)
        written = self._written * self.rows * math.prod(self.tile_threads)
        moved = self.layer.itemsize * self.groups * self.channels * (self.pixels_read + written)
        memory = blocks * moved / _BYTES_A_CLOCK
        waves = -(-blocks // self.residents)
        # Simultaneously begun blocks do not hide each other's copies.
        hidden = 1 - np.maximum(1 / self.residents, 1 / waves)
        total = np.maximum(issue, memory) + np.minimum(issue, memory) * (1 - hidden)
        return total + _BLOCK_LATENCY * (0.7 + 0.3 * waves)


def block_tiles(problem: ConvProblem, gpu: Gpu) -> tuple[BlockTile, ...]:
    """Returns the tiles worth a measurement, the best guess first."""
    is_half = problem.dtype != torch.float32
    is_stride_one = all(s == 1 for s in problem.stride)
    if (
        problem.spatial_dims != 2
        or problem.memory_format == torch.contiguous_format
        or problem.groups != problem.weight_shape[0]
        or problem.groups * problem.dtype.itemsize % _VECTOR_BYTES
        or min(problem.alignment) < _VECTOR_BYTES
        or gpu.compute_capability < MMA_CAPABILITY
        or any(d != 1 for d in problem.dilation)
        or math.prod(problem.weight_shape[2:]) == 1
        or (
            is_stride_one
            and is_half
            and math.prod(problem.weight_shape[2:]) > _MOST_TAPS_OF_STRIDE_ONE
        )
    ):
        return ()
    layer = Layer.of(problem)
    height, width = layer.height, layer.width
    if max(height.size * width.size, height.output * width.output) > _MOST_PIXELS:
        return ()
    best: dict[tuple[int, int], tuple[float, BlockTile]] = {}
    for clocks, tile in _best_tiles(layer, gpu):
        key = (tile.channels * tile.groups, tile.columns)
        if key not in best or clocks < best[key][0]:
            best[key] = (clocks, tile)
    ordered = sorted(best.values(), key=lambda found: found[0])
    return tuple(tile for _, tile in ordered[:_MOST_OFFERS])


def _best_tiles(layer: Layer, gpu: Gpu) -> Iterator[tuple[float, BlockTile]]:
    """Yields the best tile of each number of channels and columns, and its clocks."""
    counts = [count // layer.itemsize for count in _BLOCK_BYTES]
    dividing = [n for n in counts if layer.channels % n == 0]
    whole_sectors = [n for n in dividing if n * layer.itemsize % _SECTOR == 0]
    block_channels = whole_sectors or dividing or counts[1:2]
    widths = (2, 4) if layer.itemsize == 2 else (1, 2)
    lengths = layer.lengths
    row_counts = sorted({-(-lengths[0] // k) for k in range(1, 17)})
    column_counts = range(1, min(lengths[1], _MOST_COLUMNS) + 1)
    tile_threads = ((1, 2, 3, 4), (1, 2, 3, 4, 7, 8))
    # Arrays of shape (columns, others).
    columns, rows, below, beside = (
        axis.reshape(len(column_counts), -1)
        for axis in np.meshgrid(column_counts, row_counts, *tile_threads, indexing="ij")
    )
    for channels, of_block in itertools.product(widths, block_channels):
        if channels * layer.taps > _MOST_FILTER_REGISTERS:
            continue
        tiles = BlockTile(
            layer, gpu, channels, of_block // channels, columns, rows, (below, beside)
        )
        fits = (
            (tiles.threads >= _BLOCK_THREADS.start)
            & (tiles.threads < _BLOCK_THREADS.stop)
            & (tiles.registers <= _MOST_REGISTERS)
            & (tiles.shared_bytes <= min(_MOST_SHARED_BYTES, gpu.shared_bytes))
            & (tiles.size[0] < lengths[0] + rows)
            & (tiles.size[1] < lengths[1] + columns)
            & (np.maximum(tiles.window, columns * layer.width.stride) <= 32)
            & (tiles.blocks <= INT32_MAX)
        )
        clocks = np.where(fits, tiles.clocks(), math.inf)
        for at, best in enumerate(clocks.argmin(axis=1)):
            if clocks[at, best] < math.inf:
                c, r, *s = (int(axis[at, best]) for axis in (columns, rows, below, beside))
                yield (
                    float(clocks[at, best]),
                    replace(tiles, columns=c, rows=r, tile_threads=(s[0], s[1])),
                )


def block_recipe(problem: ConvProblem, tile: BlockTile) -> Recipe:
    height, width = tile.layer.height, tile.layer.width
    is_dgrad = problem.op == "dgrad"
    x_size, y_size = (height.size, width.size), (height.output, width.output)
    read, written = (y_size, x_size) if is_dgrad else (x_size, y_size)
    kernel = Kernel(
        source(__package__, "depthwise_thread.cuh", "depthwise_tile.cu"),
        "depthwise_tile",
        (
            ("ELEMENT", ELEMENTS[problem.dtype]),
            ("CHANNELS", tile.channels),
            ("COLUMNS", tile.columns),
            ("ROWS", tile.rows),
            ("GROUPS", tile.groups),
            ("THREADS_H", tile.tile_threads[0]),
            ("THREADS_W", tile.tile_threads[1]),
            ("MIN_BLOCKS", int(tile.residents)),
            ("SHARED_BYTES", int(tile.shared_bytes)),
            ("DGRAD", int(is_dgrad)),
            ("KH", height.taps),
            ("KW", width.taps),
            ("STRIDE_H", height.stride),
            ("STRIDE_W", width.stride),
            *epilogue_macros(problem),
        ),
    )
    launch = KernelLaunch(
        kernel,
        grid=(tile.blocks, 1, 1),
        block=(tile.threads, 1, 1),
        arguments=(
            *operands(problem),
            *added(problem),
            problem.groups,
            *read,
            *written,
            height.padding,
            width.padding,
            tile.chunks,
            *tile.tiles,
        ),
        shared_bytes=tile.shared_bytes,
    )
    return Recipe((launch,))
