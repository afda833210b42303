"""The weight gradient of depthwise convolutions in channels_last, on CUDA cores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.kernels.depthwise import is_dilation_small
from cudnn_autotune.engines.kernels.depthwise_wgrad_sum import (
    SUM_TEXT,
    is_depthwise_wgrad,
    partial_bytes,
    sum_launch,
    two_dimensions,
)
from cudnn_autotune.engines.kernels.sources import ELEMENTS, source, version
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe

_LEAST_CHANNELS = 8  # below, accesses are too narrow
_MOST_TAPS = 49  # whose sums fit into a thread's registers
_MOST_COLUMNS = 8
_MOST_WINDOW = 32
_BLOCK_THREADS = 256
_MOST_LANES = 128  # of a block, side by side in channels
_SM_REGISTERS, _SM_THREADS = 65536, 2048
_OTHER_REGISTERS = 27  # of a thread, besides sums and pixels
_REGISTERS = (128, 224)  # of a thread, in the order of the offers
_STEP_INSTRUCTIONS = 30  # of a step, besides those for each pixel
_PIXEL_INSTRUCTIONS = 6  # besides those for each channel
_MOST_OFFERS = 4
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class _Shape:
    """The problem in two dimensions."""

    images: int
    channels: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    itemsize: int
    alignment: int

    @property
    def slots(self) -> int:
        """Rows of dy that a row of x meets."""
        return -(-self.kernel[0] // self.stride[0])

    @property
    def longest(self) -> tuple[int, int]:
        """Rows and columns of dy at a distance of the dilation."""
        return (
            -(-self.out_size[0] // self.dilation[0]),
            -(-self.out_size[1] // self.dilation[1]),
        )


def _shape(problem: ConvProblem) -> _Shape:
    return _Shape(
        images=problem.input_shape[0],
        channels=problem.groups,
        in_size=two_dimensions(problem.input_shape[2:], 1),
        out_size=two_dimensions(problem.output_shape[2:], 1),
        kernel=two_dimensions(problem.weight_shape[2:], 1),
        stride=two_dimensions(problem.stride, 1),
        padding=two_dimensions(problem.padding[: problem.spatial_dims], 0),
        dilation=two_dimensions(problem.dilation, 1),
        itemsize=problem.dtype.itemsize,
        alignment=min(problem.alignment[0], problem.alignment[2]),
    )


@dataclass(frozen=True)
class _Tile:
    """What a thread computes at a time."""

    shape: _Shape
    channels: int
    columns: int

    @property
    def window(self) -> int:
        """Columns of x that it meets."""
        return (self.columns - 1) * self.shape.stride[1] + self.shape.kernel[1]

    @property
    def _pixels(self) -> int:
        """Of x that a step reads."""
        return min(self.shape.stride[0], self.shape.kernel[0]) * self.window

    @property
    def registers(self) -> int:
        """Of a thread, about."""
        s = self.shape
        words = -(-self.channels * s.itemsize // 4)
        values = math.prod(s.kernel) + s.slots * self.columns + self.window
        read = words * (self._pixels + self.columns)
        return -(-(self.channels * values + read + _OTHER_REGISTERS) // 8) * 8

    @property
    def instructions(self) -> float:
        """Of a step, for each element of dy."""
        s = self.shape
        count = (
            _STEP_INSTRUCTIONS
            + (self._pixels + self.columns) * (_PIXEL_INSTRUCTIONS + self.channels)
            + (math.prod(s.kernel) + s.slots) * self.columns * self.channels
        )
        useful = s.longest[1] / -(-s.longest[1] // self.columns)
        return count / (useful * self.channels)

    @property
    def lanes(self) -> int:
        """Threads of a block side by side in channels: eight fill whole sectors."""
        groups = self.shape.channels // self.channels
        chunks = -(-groups // _MOST_LANES)
        return min(groups, -(-groups // (8 * chunks)) * 8)

    @property
    def strips_at_a_time(self) -> int:
        """Of a block."""
        return max(1, _BLOCK_THREADS // self.lanes)

    @property
    def column_strips(self) -> int:
        return self.shape.dilation[1] * -(-self.shape.longest[1] // self.columns)

    @property
    def channel_chunks(self) -> int:
        return -(-self.shape.channels // (self.channels * self.lanes))

    @property
    def shared_bytes(self) -> int:
        threads = self.lanes * self.strips_at_a_time
        row_sums = self.shape.kernel[1] * self.channels * threads
        return 4 * (row_sums + self.lanes * self.channels * math.prod(self.shape.kernel))

    def blocks_at_once(self, gpu: Gpu) -> int:
        """That share the strips."""
        warps = -(-self.lanes * self.strips_at_a_time // 32)
        resident = min(
            max(1, _SM_REGISTERS // (32 * warps * self.registers)),
            _SM_THREADS // (32 * warps),
            (gpu.shared_bytes + 1024) // (self.shared_bytes + 1024),
        )
        return max(1, gpu.multiprocessors * resident // self.channel_chunks)

    def row_strips(self, rows: int) -> int:
        return self.shape.dilation[0] * -(-self.shape.longest[0] // rows)

    def strips(self, rows: int) -> int:
        return self.shape.images * self.column_strips * self.row_strips(rows)

    def splits(self, rows: int, gpu: Gpu) -> int:
        needed = -(-self.strips(rows) // self.strips_at_a_time)
        return min(needed, self.blocks_at_once(gpu))

    def best_rows(self, gpu: Gpu) -> int:
        """The rows of a strip with which the busiest thread has the fewest steps."""

        def steps(rows: int) -> int:
            a_time = self.splits(rows, gpu) * self.strips_at_a_time
            # The beginning of a strip costs about as much as two steps.
            return -(-self.strips(rows) // a_time) * (rows + self.shape.slots + 1)

        longest = self.shape.longest[0]
        return min({-(-longest // pieces) for pieces in range(1, 33)}, key=steps)


def _tiles(shape: _Shape) -> Iterator[_Tile]:
    """Yields tiles that fit into registers, the best guess first."""
    widths = [
        count
        for count in (1, 2, 4)
        if count * shape.itemsize in (2, 4, 8)
        and count * shape.itemsize <= shape.alignment
        and shape.channels % count == 0
    ]
    if shape.itemsize == 2 and len(widths) > 1:
        widths.remove(1)  # loads of two bytes
    seen = set()
    for registers in _REGISTERS:
        best = []
        for channels in widths:
            tiles = [_Tile(shape, channels, columns) for columns in range(1, _MOST_COLUMNS + 1)]
            tiles = [t for t in tiles if t.window <= _MOST_WINDOW and t.registers <= registers]
            best += sorted(tiles, key=lambda tile: tile.instructions)[:1]
        for tile in sorted(best, key=lambda tile: tile.instructions):
            if tile not in seen and tile.shared_bytes <= 48 << 10:
                seen.add(tile)
                yield tile


class DepthwiseWgrad:
    """Weight gradients of depthwise convolutions with a multiplier of 1, in channels_last: any
    stride, dilations up to twice the image, up to 49 taps, float16, bfloat16 and float32.

    A NaN or an infinity reaches the weights that depend on it, and no others. x counts as zero
    outside of its image, which an infinite dy makes NaN.
    """

    name = "depthwise_wgrad"
    version = version(
        source("depthwise_wgrad.cu"), Path(__file__).read_text(encoding="utf-8"), SUM_TEXT
    )

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        return [
            Offer(
                _settings(tile, rows),
                workspace_bytes=partial_bytes(problem, tile.splits(rows, gpu)),
            )
            for tile, rows in self._offered(problem, gpu)
        ]

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        for tile, rows in self._offered(problem, gpu):
            if _settings(tile, rows) == settings:
                splits = tile.splits(rows, gpu)
                launches = (_launch(problem, tile, rows, gpu), sum_launch(problem, splits))
                return Recipe(launches, partial_bytes(problem, splits))
        raise ValueError(f"settings: {self.name} does not offer {settings!r} for {problem.text}")

    def _offered(self, problem: ConvProblem, gpu: Gpu) -> list[tuple[_Tile, int]]:
        if not is_depthwise_wgrad(problem) or problem.memory_format != torch.channels_last:
            return []
        shape = _shape(problem)
        step = problem.dtype.itemsize * shape.channels * shape.dilation[1]
        if (
            not 1 < math.prod(shape.kernel) <= _MOST_TAPS
            or shape.channels < _LEAST_CHANNELS
            or step > _INT32_MAX
            or not is_dilation_small(problem)
        ):
            return []
        is_half = problem.dtype != torch.float32
        if is_half and min(shape.kernel) > 5 and shape.stride == shape.dilation == (1, 1):
            return []  # bound by the products, of which tensor cores compute more
        tiles = [tile for tile in _tiles(shape) if tile.channel_chunks < 1 << 16]
        found = [(tile, tile.best_rows(gpu)) for tile in tiles[:_MOST_OFFERS]]
        return [(tile, rows) for tile, rows in found if tile.strips(rows) <= _INT32_MAX]


def _settings(tile: _Tile, rows: int) -> str:
    return f"CHANNELS={tile.channels},COLUMNS={tile.columns},ROWS={rows}"


def _launch(problem: ConvProblem, tile: _Tile, rows: int, gpu: Gpu) -> KernelLaunch:
    shape = tile.shape
    kernel = Kernel(
        source("depthwise_wgrad.cu"),
        "depthwise_wgrad",
        (
            ("ELEMENT", ELEMENTS[problem.dtype]),
            ("CHANNELS", tile.channels),
            ("COLUMNS", tile.columns),
            ("KERNEL_H", shape.kernel[0]),
            ("KERNEL_W", shape.kernel[1]),
            ("STRIDE_H", shape.stride[0]),
            ("STRIDE_W", shape.stride[1]),
            ("MIN_BLOCKS", max(1, _SM_REGISTERS // (_BLOCK_THREADS * tile.registers))),
        ),
    )
    return KernelLaunch(
        kernel,
        grid=(tile.splits(rows, gpu), tile.channel_chunks, 1),
        block=(tile.lanes, tile.strips_at_a_time, 1),
        arguments=(
            Address("x"),
            Address("y"),
            Address("workspace"),
            shape.channels,
            *shape.in_size,
            *shape.out_size,
            *shape.padding,
            *shape.dilation,
            tile.row_strips(rows),
            tile.column_strips,
            tile.strips(rows),
            rows,
        ),
        shared_bytes=tile.shared_bytes,
    )
