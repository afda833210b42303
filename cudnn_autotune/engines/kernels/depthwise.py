"""Depthwise convolutions in channels_last on CUDA cores, and their gradients of the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.kernels.sources import (
    ACTIVATION_NUMBERS,
    ELEMENTS,
    source,
    version,
)
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe

_MOST_TAPS = 49  # whose filters, one a channel, fit into a thread's registers
_LEAST_CHANNELS = 8  # below, accesses are too narrow
_LEAST_ROWS = 4
_MOST_COLUMNS = 8
_MOST_FILTER_REGISTERS = 64
_REGISTERS = (128, 184)  # of a thread, in the order of the offers
_STEP_INSTRUCTIONS = 40  # of a step besides those for each pixel
_THREADS_AT_ONCE = 512  # on a multiprocessor
_BLOCK_THREADS = 256
_MOST_GROUPS = 128  # of channels in a block
_MOST_DILATION = 1024
_MOST_GRID_Y = 65535
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """What a thread computes: the settings of an offer."""

    channels: int
    columns: int
    """Of y; dgrad writes ``stride`` times as many of x."""
    rows: int
    """Of y, as well."""

    @property
    def settings(self) -> str:
        return f"CHANNELS={self.channels},COLUMNS={self.columns},ROWS={self.rows}"


@dataclass(frozen=True)
class Dimension:
    """One spatial dimension of a problem."""

    size: int
    """Of x."""
    output: int
    """Of y."""
    taps: int
    stride: int
    padding: int
    dilation: int

    def strip_length(self, op: str) -> int:
        """How many y pixels, or groups of ``stride`` x pixels, depend on each other: those at a
        distance of the dilation."""
        if op == "fprop":
            return -(-self.output // self.dilation)
        period = self.stride * self.dilation
        starts = (self.stride * r - self.padding for r in range(self.dilation))
        return max((self.size - 1 - s) // period - (-s) // period + 1 for s in starts)


def dimensions(problem: ConvProblem) -> tuple[Dimension, Dimension, Dimension]:
    """Returns depth, height and width; those that the problem lacks have one pixel."""
    found = [
        Dimension(*values)
        for values in zip(
            problem.input_shape[2:],
            problem.output_shape[2:],
            problem.weight_shape[2:],
            problem.stride,
            problem.padding,
            problem.dilation,
            strict=False,
        )
    ]
    depth, height, width = [Dimension(1, 1, 1, 1, 0, 1)] * (3 - len(found)) + found
    return depth, height, width


def is_dilation_small(problem: ConvProblem) -> bool:
    """Whether most threads of kernels that share pixels by their residue modulo the dilation have
    some; and to go over the residues is quick."""
    return all(
        d.dilation <= min(_MOST_DILATION, 2 * d.size, 2 * d.output) for d in dimensions(problem)[1:]
    )


def is_depthwise(problem: ConvProblem) -> bool:
    """Whether each output channel has one input channel, and the sizes are such that the kernels
    of this folder count pixels in 32 bits."""
    return (
        problem.op in ("fprop", "dgrad")
        and problem.dtype in ELEMENTS
        and problem.weight_shape[1] == 1
        and problem.groups > 1
        and (problem.op == "fprop" or problem.weight_shape[0] == problem.groups)
        # With a common divisor, some x pixels reach no y pixel at all, and no strip has them.
        and (
            problem.op == "fprop"
            or all(math.gcd(d.stride, d.dilation) == 1 for d in dimensions(problem)[1:])
        )
        and is_dilation_small(problem)
        and all(
            d.size + 2 * d.padding + 256 * d.stride * d.dilation <= _INT32_MAX
            for d in dimensions(problem)
        )
    )


def is_for_tensor_cores(problem: ConvProblem) -> bool:
    """Whether the products bound the problem, and tensor cores can compute them: large kernels at
    stride 1 in the half types, which are depthwise_mma's."""
    return (
        problem.dtype != torch.float32
        and problem.spatial_dims < 3
        and math.prod(problem.weight_shape[2:]) > 25
        and all(n == 1 for n in (*problem.stride, *problem.dilation))
    )


def epilogue(problem: ConvProblem) -> tuple[tuple[tuple[str, int], ...], tuple[Address, ...]]:
    """Returns the macros and the arguments of what a kernel adds to its sums."""
    defines = (
        ("HAS_BIAS", int(problem.bias)),
        ("HAS_RESIDUAL", int(problem.residual)),
        ("ACTIVATION", ACTIVATION_NUMBERS[problem.activation]),
    )
    addresses = [Address("bias")] * problem.bias + [Address("residual")] * problem.residual
    return defines, tuple(addresses)


class Depthwise:
    """Depthwise convolutions and their dgrad in channels_last: any stride, dilations up to
    twice the image, float16, bfloat16 and float32, and in fprop several outputs a channel.

    Pixels in the padding count as zeros, which an infinite weight makes NaN.
    """

    name = "depthwise"
    version = version(source("depthwise.cu"), Path(__file__).read_text(encoding="utf-8"))

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        return [Offer(tile.settings) for tile in self._tiles(problem, gpu)]

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        for tile in self._tiles(problem, gpu):
            if tile.settings == settings:
                return _recipe(problem, tile)
        raise ValueError(f"settings: {self.name} does not offer {settings!r} for {problem.text}")

    def _tiles(self, problem: ConvProblem, gpu: Gpu) -> list[Tile]:
        if (
            problem.memory_format == torch.contiguous_format
            or not is_depthwise(problem)
            or problem.groups < _LEAST_CHANNELS
            or problem.weight_shape[0] > _MOST_GROUPS * _MOST_GRID_Y
        ):
            return []
        depth, height, width = dimensions(problem)
        taps = depth.taps * height.taps * width.taps
        if not 1 < taps <= _MOST_TAPS:
            return []
        if is_for_tensor_cores(problem):
            return []
        tiles: list[Tile] = []
        longest = height.strip_length(problem.op)
        for channels, columns in _shapes(problem):
            # Two waves of threads or more, but the beginnings of strips, where products and loads
            # are repeated, must stay few.
            wanted = 2 * gpu.multiprocessors * _THREADS_AT_ONCE
            pieces = -(-wanted // _strips(problem, channels, columns))
            repeated = -(-height.taps // height.stride) - 1
            other = 2 * pieces if longest >= 8 * pieces * repeated else -(-pieces // 2)
            for count in (pieces,) if tiles else (pieces, other):
                rows = max(min(_LEAST_ROWS, longest), -(-longest // count))
                tile = Tile(channels, columns, rows)
                if tile not in tiles and _strip_counts(problem, tile)[2] <= _INT32_MAX:
                    tiles.append(tile)
        return tiles


def _shapes(problem: ConvProblem) -> list[tuple[int, int]]:
    """Returns channels and columns of threads' tiles, the best guess first.

    Of those that leave room for as many threads as the registers allow, and for more registers
    or wider accesses, the one with the fewest instructions an element.
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
    """Returns the instructions an element that is written, and the registers, of a tile of one
    thread. It knows the compiler's results for some kernels."""
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
        return math.inf, _INT32_MAX
    words = -(-channels * problem.dtype.itemsize // 4)
    sums = slots * rows_written * written * channels
    registers = taps * channels + sums + window * (words + channels) + 30
    instructions = (
        _STEP_INSTRUCTIONS
        + rows_read * depth.taps * window * (5 + channels)
        + columns * taps * channels
        + rows_written * written * (4 + channels)
    )
    length = width.strip_length(problem.op)
    useful = length / -(-length // columns)  # columns of a strip
    return instructions / (useful * channels), registers


def _strips(problem: ConvProblem, channels: int, columns: int) -> int:
    """How many threads there are if a strip has all rows."""
    depth, height, width = dimensions(problem)
    in_a_row = width.dilation * -(-width.strip_length(problem.op) // columns)
    planes = problem.input_shape[0] * (depth.output if problem.op == "fprop" else depth.size)
    return planes * in_a_row * height.dilation * (problem.weight_shape[0] // channels)


def _strip_counts(problem: ConvProblem, tile: Tile) -> tuple[int, int, int]:
    """Returns the strips along rows, along columns, and those of a channel in all images."""
    depth, height, width = dimensions(problem)
    row_strips = height.dilation * -(-height.strip_length(problem.op) // tile.rows)
    column_strips = width.dilation * -(-width.strip_length(problem.op) // tile.columns)
    planes = problem.input_shape[0] * (depth.output if problem.op == "fprop" else depth.size)
    return row_strips, column_strips, planes * row_strips * column_strips


def _recipe(problem: ConvProblem, tile: Tile) -> Recipe:
    depth, height, width = dimensions(problem)
    is_dgrad = problem.op == "dgrad"
    output_channels = problem.weight_shape[0]
    row_strips, column_strips, strips = _strip_counts(problem, tile)
    x_sizes = (depth.size, height.size, width.size)
    y_sizes = (depth.output, height.output, width.output)
    read, written = (y_sizes, x_sizes) if is_dgrad else (x_sizes, y_sizes)

    groups = output_channels // tile.channels
    chunks = -(-groups // _MOST_GROUPS)
    block_x = min(groups, -(-groups // (8 * chunks)) * 8)  # 8 lanes fill whole sectors
    block_y = max(1, min(_BLOCK_THREADS // block_x, strips))
    taps = depth.taps * height.taps * width.taps
    extra_defines, extra_arguments = epilogue(problem)
    kernel = Kernel(
        source("depthwise.cu"),
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
            *extra_defines,
        ),
    )
    launch = KernelLaunch(
        kernel,
        grid=(-(-strips // block_y), -(-groups // block_x), 1),
        block=(block_x, block_y, 1),
        arguments=(
            Address("y" if is_dgrad else "x"),
            Address("w"),
            Address("x" if is_dgrad else "y"),
            *extra_arguments,
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
            row_strips,
            column_strips,
            strips,
            tile.rows,
        ),
        shared_bytes=block_x * tile.channels * taps * problem.dtype.itemsize,
    )
    return Recipe((launch,))
