"""The weight gradient of depthwise convolutions of stride 1, on tensor cores."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.cost_model import busiest_clocks, ceil_div, occupancy
from cudnn_autotune.kernels.depthwise.depthwise_sizes import PlanarLayer, is_depthwise_wgrad
from cudnn_autotune.kernels.family import KernelFamily
from cudnn_autotune.kernels.sources import ELEMENTS, source, version_of
from cudnn_autotune.kernels.sum_parts import sum_launch, sums_bytes

_VECTOR_BYTES = 16  # bytes of eight elements
_MOST_COLUMN_BLOCKS = 8  # iterations of an unrolled loop
_OTHER_REGISTERS = 44  # per thread, besides sums and blocks of dy
_MOST_REGISTERS = 240
_MOST_OFFERS = 4
# Clocks of a multiprocessor, by which offers are put in order.
_MMA_CLOCKS = 2
_ITEM_CLOCKS = 2500  # for barriers and the latency of loads
_BYTES_A_CLOCK = 24  # from the L2 cache
_SECTOR = 32


class _Layer(PlanarLayer):
    """The sizes that a layer determines for every tiling. A signal is cut into rows of eight
    columns."""

    @property
    def blocks(self) -> int:
        """Column blocks of dy in products with a column block of x."""
        return ceil_div(self.kernel[1] + 7, 8)

    @property
    def products(self) -> int:
        """Matrix products per pair of filter rows; in a signal each has two column blocks of x."""
        return ceil_div(self.blocks, 2) if self.is_signal else self.blocks

    @property
    def tile_size(self) -> tuple[int, int]:
        """The numbers of rows of 8 columns, or of blocks of 8 rows, and of column blocks."""
        if self.is_signal:
            return ceil_div(self.out_size[1], 64), 1
        return ceil_div(self.out_size[0], 8), ceil_div(self.out_size[1], 8)


@dataclass(frozen=True)
class _Tiling:
    """The channels and filter rows of one block, by the names of the kernel's macros."""

    layer: _Layer
    channels: int
    warp_channels: int
    warp_pairs: int
    row_blocks: int
    tiles: int

    @property
    def settings(self) -> str:
        return (
            f"CHANNELS={self.channels},WARP_CHANNELS={self.warp_channels},"
            f"WARP_PAIRS={self.warp_pairs},ROW_BLOCKS={self.row_blocks},TILES={self.tiles}"
        )

    @property
    def column_blocks(self) -> int:
        blocks = self.layer.tile_size[1]
        return ceil_div(blocks, ceil_div(blocks, _MOST_COLUMN_BLOCKS))

    @property
    def tiles_down(self) -> int:
        return 1 if self.layer.is_signal else ceil_div(self.layer.tile_size[0], self.row_blocks)

    @property
    def tiles_across(self) -> int:
        if self.layer.is_signal:
            return ceil_div(self.layer.tile_size[0], self.row_blocks)
        return ceil_div(self.layer.tile_size[1], self.column_blocks)

    @property
    def items(self) -> int:
        return ceil_div(self.layer.images * self.tiles_down * self.tiles_across, self.tiles)

    @property
    def load_channels(self) -> int:
        """Channels in one read of a thread."""
        if not self.layer.is_channels_last:
            return 1
        is_four = self.channels % 4 == self.layer.channels % 4 == 0 and self.layer.alignment >= 8
        return 4 if is_four else 2

    @property
    def warp_groups(self) -> int:
        return ceil_div(ceil_div(self.layer.kernel[0], 2), self.warp_pairs)

    @property
    def warps(self) -> int:
        return self.channels // self.warp_channels * self.warp_groups

    @property
    def registers(self) -> int:
        """Registers per thread, estimated."""
        sums = self.warp_channels * self.warp_pairs * self.layer.products * 4
        return ceil_div(sums + 2 * self.layer.blocks + _OTHER_REGISTERS, 8) * 8

    @functools.cached_property
    def layout(self) -> dict[str, int]:
        """The division of shared memory, by the names that depthwise_wgrad_mma.cu uses."""
        s, rows = self.layer, 8 * self.row_blocks
        stored_rows = rows + 2 * self.warp_groups * self.warp_pairs - 1
        pitch_x = pitch_y = 1
        if not s.is_signal:
            pitch_x, pitch_y = (self.column_blocks + s.blocks - 1) | 1, self.column_blocks | 1
        tile_x = stored_rows * pitch_x + (s.blocks - 1) * s.is_signal
        tile_y = rows * pitch_y
        units, vectors = self.channels // self.load_channels, self.tiles * (tile_x + tile_y)
        apart = 1 if units >= 8 else 8 // units
        plane = vectors + (apart - vectors) % 8
        sums = self.warps * 8 * (s.products + s.products * s.is_signal) * 9 * 4
        return {
            "PITCH_X": pitch_x,
            "PITCH_Y": pitch_y,
            "TILE_X": tile_x,
            "TILE_Y": tile_y,
            "PLANE": plane,
            "SHARED_BYTES": max(self.channels * plane * _VECTOR_BYTES + self.tiles * 16, sums),
        }

    @property
    def shared_bytes(self) -> int:
        return self.layout["SHARED_BYTES"]

    def resident(self, gpu: Gpu) -> int:
        """Returns the resident blocks of a multiprocessor."""
        return occupancy(gpu, 32 * self.warps, self.registers, self.shared_bytes)

    def items_a_split(self, gpu: Gpu) -> int:
        """Returns the items of a block such that all blocks are on the GPU at once."""
        groups = ceil_div(self.layer.channels, self.channels)
        blocks = gpu.multiprocessors * self.resident(gpu)
        return ceil_div(self.items, max(1, blocks // groups))

    def splits(self, gpu: Gpu) -> int:
        return ceil_div(self.items, self.items_a_split(gpu))

    def cost(self, gpu: Gpu) -> float:
        """Estimates the clocks of the busiest multiprocessor."""
        s, rows = self.layer, 8 * self.row_blocks
        row_pairs = self.tiles * self.row_blocks / 2
        pairs = self.warp_groups * self.warp_pairs
        products = row_pairs * self.column_blocks * pairs * s.products
        matrices = row_pairs * (
            4 * (s.products if s.is_signal else self.column_blocks + s.blocks - 1) * pairs
            + 2 * self.column_blocks * self.warp_groups
        )
        if s.is_signal:
            vectors = 2 * rows + s.blocks - 1
        else:
            read_rows = min(rows + s.kernel[0] - 1, s.in_size[0])
            vectors = read_rows * (self.column_blocks + s.blocks - 1) + rows * self.column_blocks
        vectors *= self.tiles
        mma = self.channels * products * _MMA_CLOCKS
        # A vector is written once; the number of its reads from the L1 cache is a guess.
        accesses = self.channels * (matrices + vectors * 4 / 8)
        sector = max(self.channels * 2, _SECTOR) if s.is_channels_last else self.channels * 2
        memory = vectors * 8 * sector / _BYTES_A_CLOCK
        resident = self.resident(gpu)
        groups = ceil_div(s.channels, self.channels)
        blocks = ceil_div(groups * self.splits(gpu), gpu.multiprocessors)
        rounds = ceil_div(blocks, resident)
        latency = mma + accesses + memory + _ITEM_CLOCKS
        # The last round has the same number of blocks as the others, if there are others.
        blocks = rounds * min(blocks, resident)
        item = busiest_clocks(blocks, max(mma, accesses, memory), rounds, latency)
        return self.items_a_split(gpu) * item


def _tilings(layer: _Layer, gpu: Gpu) -> Iterator[_Tiling]:
    pairs, down = ceil_div(layer.kernel[0], 2), layer.tile_size[0]
    even = down + down % 2
    for channels, warp_channels, warp_pairs, row_blocks, tiles in itertools.product(
        (2, 4, 8, 16, 32),
        (1, 2),
        sorted({ceil_div(pairs, groups) for groups in (1, 2, 4, 8)}),
        sorted({1, 2, 4, 8, min(down, 8), min(even, 8)}),
        (1, 2, 4, 8),
    ):
        tiling = _Tiling(layer, channels, warp_channels, warp_pairs, row_blocks, tiles)
        if (
            channels < 2 * layer.channels
            and row_blocks <= even
            and tiles * row_blocks % 2 == 0
            and (tiles <= 2 or tiles * row_blocks <= 8)
            and 4 <= tiling.warps <= 16
            and tiling.registers <= _MOST_REGISTERS
            and tiling.shared_bytes <= gpu.shared_bytes
            and tiling.resident(gpu) >= 1
        ):
            yield tiling


@functools.lru_cache(maxsize=256)
def _best_tilings(layer: _Layer, gpu: Gpu) -> tuple[_Tiling, ...]:
    best: dict[tuple[int, ...], _Tiling] = {}  # by division among warps
    for tiling in sorted(_tilings(layer, gpu), key=lambda tiling: tiling.cost(gpu)):
        best.setdefault((tiling.channels, tiling.warp_channels, tiling.warp_pairs), tiling)
    return tuple(best.values())[:_MOST_OFFERS]


class DepthwiseWgradMma(KernelFamily[_Tiling]):
    """Weight gradients of depthwise convolutions with multiplier, stride and dilation of 1, in the
    half types. It takes one and two dimensions, contiguous, and channels_last with an even number
    of channels.

    A NaN or an infinity reaches the weights that depend on it, and no others. x counts as zero
    outside of its image, which an infinite dy makes NaN.
    """

    name = "depthwise_wgrad_mma"
    version = version_of(__name__)

    def workspace_bytes(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> int:
        return sums_bytes(problem, tiling.splits(gpu))

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        splits = tiling.splits(gpu)
        launches = (_launch(problem, tiling, gpu), sum_launch(problem, splits, most_numbers=1))
        return Recipe(launches, sums_bytes(problem, splits))

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        if (
            not is_depthwise_wgrad(problem)
            or problem.spatial_dims > 2
            or problem.dtype == torch.float32
            or any(value != 1 for value in (*problem.stride, *problem.dilation))
        ):
            return []
        layer = _Layer.of(problem)
        if layer.is_channels_last and max(layer.kernel) <= 3:
            return []  # bound by DRAM: tensor cores gain nothing
        if layer.kernel == (1, 1) or (
            layer.is_channels_last and (layer.channels % 2 or layer.alignment < 4)
        ):
            return []
        return _best_tilings(layer, gpu)


def _launch(problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> KernelLaunch:
    layer = tiling.layer
    has_pairs = layer.in_size[1] % 2 == layer.out_size[1] % 2 == 0 and layer.alignment >= 4
    layout: tuple[tuple[str, int], ...] = (("CHANNELS_LAST", 1), ("PAIRS", 0), ("ODD", 0))
    if not layer.is_channels_last:
        is_odd = has_pairs and layer.padding[1] % 2
        layout = (("CHANNELS_LAST", 0), ("PAIRS", int(has_pairs)), ("ODD", int(is_odd)))
    kernel = Kernel(
        source(__package__, "depthwise_wgrad_mma.cu"),
        "depthwise_wgrad_mma",
        (
            ("ELEMENT", ELEMENTS[problem.dtype]),
            ("KERNEL_H", layer.kernel[0]),
            ("KERNEL_W", layer.kernel[1]),
            *layout,
            ("SIGNAL", int(layer.is_signal)),
            ("CHANNELS", tiling.channels),
            ("WARP_CHANNELS", tiling.warp_channels),
            ("LOAD_CHANNELS", tiling.load_channels),
            ("WARP_PAIRS", tiling.warp_pairs),
            ("ROW_BLOCKS", tiling.row_blocks),
            ("COLUMN_BLOCKS", tiling.column_blocks),
            ("TILES", tiling.tiles),
            ("MIN_BLOCKS", tiling.resident(gpu)),
            *tiling.layout.items(),
        ),
    )
    return KernelLaunch(
        kernel,
        grid=(ceil_div(layer.channels, tiling.channels) * tiling.splits(gpu), 1, 1),
        block=(32 * tiling.warps, 1, 1),
        arguments=(
            Address("x"),
            Address("y"),
            Address("workspace"),
            layer.images,
            layer.channels,
            *layer.in_size,
            *layer.out_size,
            *layer.padding,
            tiling.tiles_down,
            tiling.tiles_across,
            tiling.items,
            tiling.items_a_split(gpu),
        ),
        shared_bytes=tiling.shared_bytes,
    )
