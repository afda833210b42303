"""The weight gradient of depthwise convolutions in channels_last, on CUDA cores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.cost_model import occupancy
from cudnn_autotune.kernels.depthwise.depthwise_sizes import (
    Layer,
    is_depthwise_wgrad,
    is_dilation_small,
)
from cudnn_autotune.kernels.family import INT32_MAX, KernelFamily
from cudnn_autotune.kernels.sources import ELEMENTS, source, version_of
from cudnn_autotune.kernels.sum_parts import sum_launch, sums_bytes

_LEAST_CHANNELS = 8  # below, accesses are too narrow
_MOST_TAPS = 49  # per depth, so that a thread's registers hold their sums
_MOST_DEPTHS = 64  # per filter
_COLUMNS = range(1, 9)
_MOST_WINDOW = 32
_MOST_LANES = 128  # threads of a block side by side in channels
_OTHER_REGISTERS = 27  # per thread, besides sums and pixels
# The most registers of a thread, and the number of tiles that are offered with them, in order.
_OFFERS = ((224, 2), (168, 1))
_OFFERS_FLOAT32 = (*_OFFERS, (128, 1))
_OFFERS_3D = ((168, 1), (128, 2), (224, 1))
_STEP_INSTRUCTIONS = 30  # per step, besides those for each pixel
_PIXEL_INSTRUCTIONS = 6  # besides those for each channel


@dataclass(frozen=True)
class _Tile:
    """The pixels and taps of a thread's products at a time."""

    layer: Layer
    channels: int
    columns: int
    depths: int
    """Depths of the filter."""
    rows: int = 1
    """Rows of dy."""

    @property
    def settings(self) -> str:
        depths = f",DEPTHS={self.depths}" if self.layer.depth.taps > 1 else ""
        return f"CHANNELS={self.channels},COLUMNS={self.columns}{depths},ROWS={self.rows}"

    @property
    def taps(self) -> int:
        return self.depths * self.layer.taps

    @property
    def window(self) -> int:
        """Columns of x in its products."""
        return (self.columns - 1) * self.layer.width.stride + self.layer.width.taps

    @property
    def _pixels(self) -> int:
        """Pixels of x in a step's reads."""
        height = self.layer.height
        return min(height.stride, height.taps) * self.depths * self.window

    @property
    def registers(self) -> int:
        """Registers per thread, estimated."""
        s = self.layer
        words = -(-self.channels * s.itemsize // 4)
        of_depths = 2 + self.depths if s.depth.taps > 1 else 0
        values = self.taps + s.slots * self.columns + self.window
        read = words * (self._pixels + self.columns)
        return -(-(self.channels * values + read + of_depths + _OTHER_REGISTERS) // 8) * 8

    @property
    def instructions(self) -> float:
        """Instructions of the steps of all taps, per element of dy."""
        s = self.layer
        count = (
            _STEP_INSTRUCTIONS
            + (self._pixels + self.columns) * (_PIXEL_INSTRUCTIONS + self.channels)
            + (self.taps + s.slots) * self.columns * self.channels
        )
        useful = s.lengths[1] / -(-s.lengths[1] // self.columns)
        return self.depth_groups * count / (useful * self.channels)

    @property
    def lanes(self) -> int:
        """Adjacent threads of a block along channels: eight fill whole sectors."""
        groups = self.layer.channels // self.channels
        chunks = -(-groups // _MOST_LANES)
        return min(groups, -(-groups // (8 * chunks)) * 8)

    @property
    def most_threads(self) -> int:
        """Most threads per block: a third of the registers is too few for 256."""
        return 384 if 128 < self.registers <= 168 else 256

    @property
    def tiles_at_a_time(self) -> int:
        """Simultaneous tiles of a block."""
        return max(1, self.most_threads // self.lanes)

    @property
    def tiles_across(self) -> int:
        return self.layer.width.dilation * -(-self.layer.lengths[1] // self.columns)

    @property
    def channel_chunks(self) -> int:
        return -(-self.layer.channels // (self.channels * self.lanes))

    @property
    def depth_groups(self) -> int:
        return self.layer.depth.taps // self.depths

    @property
    def shared_bytes(self) -> int:
        threads = self.lanes * self.tiles_at_a_time
        row_sums = self.layer.width.taps * self.channels * threads
        return 4 * (row_sums + self.lanes * self.channels * self.taps)

    def min_blocks(self, gpu: Gpu) -> int:
        """Blocks of a multiprocessor for which the compiler leaves registers."""
        of_registers = gpu.sm_registers // (self.most_threads * self.registers)
        return max(1, min(of_registers, gpu.sm_threads // self.most_threads))

    def blocks_at_once(self, gpu: Gpu) -> int:
        """Returns the blocks that share the tiles."""
        threads = self.lanes * self.tiles_at_a_time
        resident = max(1, occupancy(gpu, threads, self.registers, self.shared_bytes))
        return max(1, gpu.multiprocessors * resident // (self.channel_chunks * self.depth_groups))

    @property
    def tiles_down(self) -> int:
        return self.layer.height.dilation * -(-self.layer.lengths[0] // self.rows)

    @property
    def tile_count(self) -> int:
        return self.layer.images * self.layer.depth.output * self.tiles_across * self.tiles_down

    def splits(self, gpu: Gpu) -> int:
        needed = -(-self.tile_count // self.tiles_at_a_time)
        return min(needed, self.blocks_at_once(gpu))

    def with_best_rows(self, gpu: Gpu) -> _Tile:
        """Returns the tile with the fewest steps of the busiest thread."""

        def steps(tile: _Tile) -> int:
            a_time = tile.splits(gpu) * self.tiles_at_a_time
            # The beginning of a tile costs about as much as two steps.
            return -(-tile.tile_count // a_time) * (tile.rows + self.layer.slots + 1)

        longest = self.layer.lengths[0]
        rows = {-(-longest // pieces) for pieces in range(1, 33)}
        return min((replace(self, rows=count) for count in rows), key=steps)


def _tiles(layer: Layer) -> list[_Tile]:
    """Returns tiles that fit into registers and shared memory, the best guess first."""
    widths = [
        count
        for count in (1, 2, 4)
        if count * layer.itemsize in (2, 4, 8)
        and count * layer.itemsize <= layer.alignment
        and layer.channels % count == 0
    ]
    wide = [count for count in widths if count * layer.itemsize > 2]
    # Loads of two bytes are for odd channels, and for many taps, if nothing else fits.
    return list(_tiles_of(layer, wide)) or list(_tiles_of(layer, widths))


def _tiles_of(layer: Layer, widths: list[int]) -> Iterator[_Tile]:
    depth_counts = sorted({1, layer.depth.taps})
    seen = set()
    offers = _OFFERS if layer.itemsize == 2 else _OFFERS_FLOAT32
    for registers, most in _OFFERS_3D if layer.depth.taps > 1 else offers:
        best = []
        for channels, depths in itertools.product(widths, depth_counts):
            tiles = [_Tile(layer, channels, count, depths) for count in _COLUMNS]
            tiles = [t for t in tiles if t.window <= _MOST_WINDOW and t.registers <= registers]
            if depths < layer.depth.taps and registers != 128:
                continue  # more threads are better than more columns
            best += sorted(tiles, key=lambda tile: tile.instructions)[:1]
        for tile in sorted(best, key=lambda tile: tile.instructions)[:most]:
            if tile not in seen and tile.shared_bytes <= 48 << 10:
                seen.add(tile)
                yield tile


class DepthwiseWgrad(KernelFamily[_Tile]):
    """Weight gradients of depthwise convolutions with a multiplier of 1, in channels_last. It takes
    any stride, dilations up to twice the image, up to 49 taps in a depth, float16, bfloat16 and
    float32.

    A NaN or an infinity reaches the weights that depend on it, and no others. x counts as zero
    outside of its image, which an infinite dy makes NaN.
    """

    name = "depthwise_wgrad"
    version = version_of(__name__)

    min_capability = (0, 0)
    numerical_notes = ()

    def workspace_bytes(self, problem: ConvProblem, tiling: _Tile, gpu: Gpu) -> int:
        return sums_bytes(problem, tiling.splits(gpu))

    def build(self, problem: ConvProblem, tiling: _Tile, gpu: Gpu) -> Recipe:
        splits = tiling.splits(gpu)
        add = _launch(problem, tiling, gpu)
        return Recipe(
            (add, sum_launch(problem, splits, most_numbers=1)), sums_bytes(problem, splits)
        )

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> list[_Tile]:
        if not is_depthwise_wgrad(problem) or problem.memory_format == torch.contiguous_format:
            return []
        layer = Layer.of(problem)
        step = problem.dtype.itemsize * layer.channels * layer.width.dilation
        taps_of_depth = layer.taps
        if (
            taps_of_depth * layer.depth.taps == 1
            or taps_of_depth > _MOST_TAPS
            or layer.depth.taps > _MOST_DEPTHS
            or layer.channels < _LEAST_CHANNELS
            or step > INT32_MAX
            or not is_dilation_small(problem)
        ):
            return []
        is_plain = all(n == 1 for n in (*problem.stride, *problem.dilation))
        is_large = min(layer.height.taps, layer.width.taps) >= 5 and problem.spatial_dims < 3
        has_pairs = problem.dtype != torch.float32 and layer.channels % 2 == 0
        if is_large and is_plain and has_pairs and layer.alignment >= 4:
            return []  # bound by products, and tensor cores compute more of them
        tiles = [tile for tile in _tiles(layer) if tile.channel_chunks < 1 << 16]
        found = [tile.with_best_rows(gpu) for tile in tiles]
        return [tile for tile in found if tile.tile_count <= INT32_MAX]


def _launch(problem: ConvProblem, tile: _Tile, gpu: Gpu) -> KernelLaunch:
    layer = tile.layer
    depth, height, width = layer.depth, layer.height, layer.width
    kernel = Kernel(
        source(__package__, "depthwise_wgrad.cu"),
        "depthwise_wgrad",
        (
            ("ELEMENT", ELEMENTS[problem.dtype]),
            ("CHANNELS", tile.channels),
            ("COLUMNS", tile.columns),
            ("DEPTHS", tile.depths),
            ("KERNEL_H", height.taps),
            ("KERNEL_W", width.taps),
            ("STRIDE_H", height.stride),
            ("STRIDE_W", width.stride),
            ("THREADS", tile.most_threads),
            ("MIN_BLOCKS", tile.min_blocks(gpu)),
        ),
    )
    return KernelLaunch(
        kernel,
        grid=(tile.splits(gpu), tile.channel_chunks, tile.depth_groups),
        block=(tile.lanes, tile.tiles_at_a_time, 1),
        arguments=(
            Address("x"),
            Address("y"),
            Address("workspace"),
            layer.channels,
            *(d.size for d in (depth, height, width)),
            *(d.output for d in (depth, height, width)),
            depth.stride,
            *(d.padding for d in (depth, height, width)),
            *(d.dilation for d in (depth, height, width)),
            tile.tiles_down,
            tile.tiles_across,
            tile.tile_count,
            tile.rows,
        ),
        shared_bytes=tile.shared_bytes,
    )
