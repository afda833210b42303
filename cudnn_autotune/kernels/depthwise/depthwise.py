"""Depthwise convolutions in channels_last on CUDA cores, and their gradients of the input."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.depthwise.depthwise_sizes import (
    added,
    dimensions,
    is_depthwise,
    is_for_tensor_cores,
)
from cudnn_autotune.kernels.depthwise.depthwise_tile import BlockTile, block_recipe, block_tiles
from cudnn_autotune.kernels.family import (
    INT32_MAX,
    MMA_CAPABILITY,
    KernelFamily,
    epilogue_macros,
    operands,
)
from cudnn_autotune.kernels.sources import ELEMENTS, source, version_of

_MOST_TAPS = 49  # so that a thread's registers hold one filter for each of its channels
_LEAST_CHANNELS = 8  # below, accesses are too narrow
_LEAST_ROWS = 4
_MOST_THREAD_TILES = 2
_MOST_COLUMNS = 8
_MOST_FILTER_REGISTERS = 64
_REGISTERS = (128, 184)  # limits per thread, in the order of the offers
_STEP_INSTRUCTIONS = 40  # per step, besides those for each pixel
_THREADS_AT_ONCE = 512  # per multiprocessor
_BLOCK_THREADS = 256
_MOST_GROUPS = 128  # groups of channels per block
_MOST_GRID_Y = 65535


@dataclass(frozen=True)
class Tile:
    """The output pixels of one thread, which are the settings of an offer."""

    channels: int
    columns: int
    """Columns of y; dgrad writes ``stride`` times as many columns of x."""
    rows: int
    """Rows of y; dgrad writes ``stride`` times as many rows of x."""

    @property
    def settings(self) -> str:
        return f"CHANNELS={self.channels},COLUMNS={self.columns},ROWS={self.rows}"


class Depthwise(KernelFamily[BlockTile | Tile]):
    """Depthwise convolutions and their dgrad in channels_last. It takes any stride, dilations up to
    twice the image, float16, bfloat16 and float32, and in fprop several outputs a channel.

    Pixels in the padding count as zeros, which an infinite weight makes NaN.
    """

    name = "depthwise"
    version = version_of(__name__)

    min_capability = (0, 0)
    numerical_notes = ()

    def build(self, problem: ConvProblem, tiling: BlockTile | Tile, gpu: Gpu) -> Recipe:
        if isinstance(tiling, BlockTile):
            return block_recipe(problem, tiling)
        return _recipe(problem, tiling)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> list[BlockTile | Tile]:
        if not is_depthwise(problem):
            return []
        of_blocks = block_tiles(problem, gpu)
        tiles = self._thread_tiles(problem, gpu)
        if of_blocks:
            is_plain_half = problem.dtype != torch.float32 and max(problem.stride) == 1
            tiles = [] if is_plain_half else tiles[:_MOST_THREAD_TILES]
        return [*of_blocks, *tiles]

    def _thread_tiles(self, problem: ConvProblem, gpu: Gpu) -> list[Tile]:
        if (
            problem.memory_format == torch.contiguous_format
            or problem.groups < _LEAST_CHANNELS
            or problem.weight_shape[0] > _MOST_GROUPS * _MOST_GRID_Y
        ):
            return []
        depth, height, width = dimensions(problem)
        taps = depth.taps * height.taps * width.taps
        if not 1 < taps <= _MOST_TAPS:
            return []
        if is_for_tensor_cores(problem, gpu) or _is_faster_on_tensor_cores(problem, gpu):
            return []
        tiles: list[Tile] = []
        longest = height.residue_length(problem.op)
        for channels, columns in _shapes(problem):
            # Two waves of threads or more, but few beginnings of tiles, where products and loads
            # are repeated.
            wanted = 2 * gpu.multiprocessors * _THREADS_AT_ONCE
            parts = -(-wanted // _tiles(problem, channels, columns))
            repeated = -(-height.taps // height.stride) - 1
            other = 2 * parts if longest >= 8 * parts * repeated else -(-parts // 2)
            for count in (parts,) if tiles else (parts, other):
                rows = max(min(_LEAST_ROWS, longest), -(-longest // count))
                tile = Tile(channels, columns, rows)
                if tile not in tiles and _tile_counts(problem, tile)[2] <= INT32_MAX:
                    tiles.append(tile)
        return tiles


def _is_faster_on_tensor_cores(problem: ConvProblem, gpu: Gpu) -> bool:
    """Returns whether it is a 5x5 of stride 1: tensor cores take half the time."""
    return (
        problem.dtype != torch.float32
        and problem.spatial_dims == 2
        and min(problem.weight_shape[2:]) >= 5
        and all(n == 1 for n in (*problem.stride, *problem.dilation))
        and problem.groups % 8 == 0
        and problem.weight_shape[0] == problem.groups
        and min(problem.alignment) >= 16
        and gpu.compute_capability >= MMA_CAPABILITY
    )


def _shapes(problem: ConvProblem) -> list[tuple[int, int]]:
    """Returns channels and columns of threads' tiles, the best guess first.

    For each limit of registers and each width of accesses, it is the tile within the limit that has
    the fewest instructions an element.
    """
    itemsize = problem.dtype.itemsize
    taps = math.prod(problem.weight_shape[2:])
    multiplier = problem.weight_shape[0] // problem.groups
    widths = [
        count
        for count in (1, 2, 4)
        if count == 1
        or (
            count * itemsize in (4, 8)
            and count * itemsize <= min(problem.alignment)
            and problem.groups % count == 0
            and multiplier == 1
            and count * taps <= _MOST_FILTER_REGISTERS
        )
    ]
    if itemsize == 2 and len(widths) > 1:
        widths.remove(1)  # loads of two bytes
    shapes: list[tuple[int, int]] = []
    for registers in _REGISTERS:
        for channels in widths:
            found = [
                (instructions, columns)
                for columns in range(1, _MOST_COLUMNS + 1)
                for instructions, needed in [_estimate(problem, channels, columns)]
                if needed <= registers
            ]
            if found and (channels, min(found)[1]) not in shapes:
                shapes.append((channels, min(found)[1]))
    return shapes[:3]


def _estimate(problem: ConvProblem, channels: int, columns: int) -> tuple[float, int]:
    """Returns a thread's tile's instructions per written element, and its registers. It has the
    compiler's results for some kernels."""
    depth, height, width = dimensions(problem)
    taps = depth.taps * height.taps * width.taps
    slots = -(-height.taps // height.stride)
    if problem.op == "fprop":
        rows_read, rows_written = min(height.stride, height.taps), 1
        window, written = (columns - 1) * width.stride + width.taps, columns
    else:
        rows_read, rows_written = 1, height.stride
        window, written = columns - 1 + -(-width.taps // width.stride), columns * width.stride
    if max(window, written) > 32:
        return math.inf, INT32_MAX
    words = -(-channels * problem.dtype.itemsize // 4)
    sums = slots * rows_written * written * channels
    registers = taps * channels + sums + window * (words + channels) + 30
    instructions = (
        _STEP_INSTRUCTIONS
        + rows_read * depth.taps * window * (5 + channels)
        + columns * taps * channels
        + rows_written * written * (4 + channels)
    )
    length = width.residue_length(problem.op)
    useful = length / -(-length // columns)  # columns of a tile
    return instructions / (useful * channels), registers


def _tiles(problem: ConvProblem, channels: int, columns: int) -> int:
    """Returns the number of threads if each thread computes all rows."""
    depth, height, width = dimensions(problem)
    in_a_row = width.dilation * -(-width.residue_length(problem.op) // columns)
    planes = problem.input_shape[0] * (depth.output if problem.op == "fprop" else depth.size)
    return planes * in_a_row * height.dilation * (problem.weight_shape[0] // channels)


def _tile_counts(problem: ConvProblem, tile: Tile) -> tuple[int, int, int]:
    """Returns the tiles along rows, along columns, and of a channel in all images."""
    depth, height, width = dimensions(problem)
    tiles_down = height.dilation * -(-height.residue_length(problem.op) // tile.rows)
    tiles_across = width.dilation * -(-width.residue_length(problem.op) // tile.columns)
    planes = problem.input_shape[0] * (depth.output if problem.op == "fprop" else depth.size)
    return tiles_down, tiles_across, planes * tiles_down * tiles_across


def _recipe(problem: ConvProblem, tile: Tile) -> Recipe:
    depth, height, width = dimensions(problem)
    is_dgrad = problem.op == "dgrad"
    output_channels = problem.weight_shape[0]
    tiles_down, tiles_across, tiles = _tile_counts(problem, tile)
    x_sizes = (depth.size, height.size, width.size)
    y_sizes = (depth.output, height.output, width.output)
    read, written = (y_sizes, x_sizes) if is_dgrad else (x_sizes, y_sizes)

    groups = output_channels // tile.channels
    chunks = -(-groups // _MOST_GROUPS)
    block_x = min(groups, -(-groups // (8 * chunks)) * 8)  # 8 lanes fill whole sectors
    block_y = max(1, min(_BLOCK_THREADS // block_x, tiles))
    taps = depth.taps * height.taps * width.taps
    kernel = Kernel(
        source(__package__, "depthwise_thread.cuh", "depthwise.cu"),
        "depthwise_channels_last",
        (
            ("ELEMENT", ELEMENTS[problem.dtype]),
            ("CHANNELS", tile.channels),
            ("COLUMNS", tile.columns),
            ("DGRAD", int(is_dgrad)),
            ("KT", depth.taps),
            ("KH", height.taps),
            ("KW", width.taps),
            ("STRIDE_H", height.stride),
            ("STRIDE_W", width.stride),
            *epilogue_macros(problem),
        ),
    )
    launch = KernelLaunch(
        kernel,
        grid=(-(-tiles // block_y), -(-groups // block_x), 1),
        block=(block_x, block_y, 1),
        arguments=(
            *operands(problem),
            *added(problem),
            output_channels,
            output_channels // problem.groups,
            *read,
            *written,
            depth.stride,
            depth.padding,
            height.padding,
            width.padding,
            depth.dilation,
            height.dilation,
            width.dilation,
            tiles_down,
            tiles_across,
            tiles,
            tile.rows,
        ),
        shared_bytes=block_x * tile.channels * taps * problem.dtype.itemsize,
    )
    return Recipe((launch,))
