"""Depthwise convolutions in contiguous layout on CUDA cores, and their gradients of the input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.depthwise.depthwise_sizes import (
    Dimension,
    added,
    dimensions,
    is_depthwise,
    is_for_tensor_cores,
)
from cudnn_autotune.kernels.family import INT32_MAX, KernelFamily, epilogue_macros, operands
from cudnn_autotune.kernels.sources import ELEMENTS, source, version_of

_MOST_TAPS = 64  # so that a thread's registers hold the filter
_MOST_WINDOW = 64  # pixels of a row in a thread's registers
_MOST_SPAN = 1024  # rows between the first and last tap of a column, whose loop is unrolled
_MOST_VALUES = 160  # a thread's filter, sums and pixels, in registers
_MOST_THREADS = 256
_THREADS = 192  # wanted
_BLOCKS_AT_ONCE = 4  # per multiprocessor, so that some load while others compute
_MOST_ROW_THREADS = 128  # threads side by side in a row of a tile


@dataclass(frozen=True)
class Tile:
    """The output pixels of one block, which are the settings of an offer."""

    columns: int
    """Columns of y, or groups of ``stride`` columns of x, per thread."""
    row_threads: int
    """Threads side by side in a row."""
    rows: int
    """Rows of y, or groups of ``stride`` rows of x."""
    planes: int

    @property
    def settings(self) -> str:
        return (
            f"COLUMNS={self.columns},ROW_THREADS={self.row_threads},"
            f"ROWS={self.rows},PLANES={self.planes}"
        )


class DepthwisePlanes(KernelFamily[Tile]):
    """Depthwise convolutions and their dgrad in contiguous layout, in one to three dimensions,
    float16, bfloat16 and float32. Registers limit strides and dilations.

    Pixels in the padding count as zeros, which an infinite weight makes NaN.
    """

    name = "depthwise_planes"
    version = version_of(__name__)

    min_capability = (0, 0)
    numerical_notes = ()

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Tile]:
        return _tiles(problem, gpu)

    def build(self, problem: ConvProblem, tiling: Tile, gpu: Gpu) -> Recipe:
        return _Geometry(problem, tiling).recipe()


def _tiles(problem: ConvProblem, gpu: Gpu) -> list[Tile]:
    if (
        problem.memory_format != torch.contiguous_format
        or not is_depthwise(problem)
        or problem.weight_shape[0] != problem.groups
        or is_for_tensor_cores(problem, gpu)
    ):
        return []
    depth, height, width = dimensions(problem)
    taps = depth.taps * height.taps * width.taps
    if not 1 < taps <= _MOST_TAPS:
        return []
    if problem.spatial_dims == 1 and width.stride == 1:
        return []  # cuDNN was 1.1 to 10 times as fast on an H200
    if problem.op == "dgrad" and width.stride > 1 and width.dilation > 1:
        return []
    tiles: list[Tile] = []
    for columns, most_rows in _shapes(problem, height, width):
        length = _columns(problem.op, width)
        row_threads = -(-length // columns)
        if row_threads > _MOST_ROW_THREADS:
            parts = -(-row_threads // _MOST_ROW_THREADS)
            row_threads = (
                -(-row_threads // (8 * parts)) * 8
            )  # tiles begin where vectors are aligned
        rows = _even(height.residue_length(problem.op), most_rows)
        planes = min(max(1, _THREADS // row_threads), _planes(problem))
        room = gpu.shared_bytes // _BLOCKS_AT_ONCE
        tile = Tile(columns, row_threads, rows, planes)
        while _Geometry(problem, tile).shared_bytes > room and planes > 1:
            planes = -(-planes // 2)
            tile = Tile(columns, row_threads, rows, planes)
        while _Geometry(problem, tile).shared_bytes > room and rows > 1:
            rows = -(-rows // 2)
            tile = Tile(columns, row_threads, rows, planes)
        geometry = _Geometry(problem, tile)
        if (
            tile not in tiles
            and geometry.shared_bytes <= gpu.shared_bytes
            and geometry.values <= _MOST_VALUES
            and geometry.blocks <= INT32_MAX
        ):
            tiles.append(tile)
    return tiles


def _shapes(problem: ConvProblem, height: Dimension, width: Dimension) -> Iterator[tuple[int, int]]:
    """Yields the columns of a thread and the most rows of a tile, the best guess first.

    More columns share the loads of a row, and need more shared memory a thread. An odd number
    has no bank conflicts.
    """
    if height.taps == 1:
        wanted = [(9, 4), (5, 4), (13, 4)] if width.taps > 9 else [(3, 4), (1, 4)]
    elif height.taps * width.taps >= 25 and height.stride == width.stride == 1:
        wanted = [(5, 14), (3, 14), *([(7, 14)] if height.taps >= 7 else [])]
    else:
        wanted = [(1, 28), (3, 14), (1, 14)]
    for columns, rows in wanted:
        window = (columns - 1) * width.stride + (width.taps - 1) * width.dilation + 1
        if window <= (_MOST_SPAN if columns == 1 else _MOST_WINDOW):
            yield columns, rows


def _even(length: int, most: int) -> int:
    """Returns the size of about equal parts of at most ``most``."""
    return -(-length // -(-length // most))


def _planes(problem: ConvProblem) -> int:
    """Returns the number of adjacent planes of the written tensor: in 3-d a channel's, else all
    channels' of all images."""
    shape = problem.output_shape if problem.op == "fprop" else problem.input_shape
    return shape[2] if problem.spatial_dims == 3 else shape[0] * shape[1]


def _columns(op: str, width: Dimension) -> int:
    """Returns the columns of y, or groups of columns of x."""
    if op == "fprop":
        return width.output
    return (width.size - 1 + width.padding) // width.stride - width.padding // width.stride + 1


class _Geometry:
    """Sizes that a problem and a tile determine."""

    def __init__(self, problem: ConvProblem, tile: Tile) -> None:
        self.problem, self.tile = problem, tile
        self.is_dgrad = problem.op == "dgrad"
        depth, height, width = self.dimensions = dimensions(problem)
        self.tile_columns = tile.columns * tile.row_threads
        slots = -(-height.taps // height.stride)
        reach = (depth.taps - 1) * depth.dilation
        width_read, width_written = width.size, width.output
        if self.is_dgrad:
            width_read, width_written = width_written, width_read
            reach_w = (-(-width.taps // width.stride) - 1) * width.dilation
            first = width.padding // width.stride - reach_w
            columns_in = self.tile_columns + reach_w
            self.planes_in = (tile.planes - 1 + reach) // depth.stride
            self.planes_in += 1 if depth.stride == 1 else 2
            self.rows_in = tile.rows + slots - 1
            phases, rows_out = 1, tile.rows * height.stride
            columns_out = self.tile_columns * width.stride
        else:
            first = -width.padding
            columns_in = (self.tile_columns - 1) * width.stride
            columns_in += (width.taps - 1) * width.dilation + 1
            self.planes_in = (tile.planes - 1) * depth.stride + reach + 1
            self.rows_in = (tile.rows + slots - 2) * height.stride
            self.rows_in += min(height.stride, height.taps)
            phases, rows_out, columns_out = width.stride, tile.rows, self.tile_columns
        self.vector_in = self._vector(width_read)
        if self.vector_in % phases:
            self.vector_in = 1
        self.vector_out = self._vector(width_written)
        self.shift = first % self.vector_in
        self.vectors_in = -(-(columns_in + self.shift) // self.vector_in)
        self.pitch = -(-self.vectors_in * self.vector_in // (4 * phases)) * 4
        self.pitch_out = -(-(columns_out + self.vector_out - 1) // 4) * 4
        # More threads than the tile needs, if registers allow, so that more loads are under way.
        sums = slots * tile.columns * (height.stride * width.stride if self.is_dgrad else 1)
        taps = depth.taps * height.taps * width.taps
        window = (tile.columns - 1) * width.stride + (width.taps - 1) * width.dilation + 1
        self.values = taps + sums + min(window, tile.columns * width.taps)
        wanted = _MOST_THREADS if sums + taps <= 48 else _MOST_THREADS // 2
        self.threads = max(wanted, -(-tile.planes * tile.row_threads // 32) * 32)
        self.shared_bytes = 4 * (
            self.planes_in * self.rows_in * phases * self.pitch
            + tile.planes * rows_out * self.pitch_out
        )

    def _vector(self, width: int) -> int:
        """Returns the elements of a vector, of at most 16 bytes, to which all rows are aligned."""
        itemsize = self.problem.dtype.itemsize
        most = min(16, *self.problem.alignment) // itemsize
        return math.gcd(width, max(1, most))

    @property
    def tiles(self) -> tuple[int, int, int]:
        """The tiles along planes, rows and columns."""
        tile, (_, height, width) = self.tile, self.dimensions
        return (
            -(-_planes(self.problem) // tile.planes),
            height.dilation * -(-height.residue_length(self.problem.op) // tile.rows),
            -(-_columns(self.problem.op, width) // self.tile_columns),
        )

    @property
    def blocks(self) -> int:
        is_3d = self.problem.spatial_dims == 3
        return math.prod(self.problem.input_shape[:2] if is_3d else ()) * math.prod(self.tiles)

    def recipe(self) -> Recipe:
        problem, tile = self.problem, self.tile
        depth, height, width = self.dimensions
        is_3d = problem.spatial_dims == 3
        planes = _planes(problem)
        plane_tiles, row_tiles, column_tiles = self.tiles
        read, written = ("y", "x") if self.is_dgrad else ("x", "y")
        sizes = {
            "x": (depth.size if is_3d else planes, height.size, width.size),
            "y": (depth.output if is_3d else planes, height.output, width.output),
        }
        kernel = Kernel(
            source(__package__, "depthwise_planes.cu"),
            "depthwise_planes",
            (
                ("ELEMENT", ELEMENTS[problem.dtype]),
                ("THREADS", self.threads),
                ("COLUMNS", tile.columns),
                ("DGRAD", int(self.is_dgrad)),
                ("IS_3D", int(is_3d)),
                ("KT", depth.taps),
                ("KH", height.taps),
                ("KW", width.taps),
                ("STRIDE_D", depth.stride),
                ("STRIDE_H", height.stride),
                ("STRIDE_W", width.stride),
                ("DILATION_W", width.dilation),
                ("VECTOR_IN", self.vector_in),
                ("VECTOR_OUT", self.vector_out),
                ("SHIFT", self.shift),
                *epilogue_macros(problem),
            ),
        )
        launch = KernelLaunch(
            kernel,
            grid=(self.blocks, 1, 1),
            block=(self.threads, 1, 1),
            arguments=(
                *operands(problem),
                *added(problem),
                problem.groups,
                *sizes[read],
                *sizes[written],
                depth.padding,
                height.padding,
                width.padding,
                depth.dilation,
                height.dilation,
                plane_tiles,
                row_tiles,
                column_tiles,
                tile.planes,
                tile.rows,
                self.tile_columns,
                self.planes_in,
                self.rows_in,
                self.vectors_in,
                self.pitch,
                self.pitch_out,
            ),
            shared_bytes=self.shared_bytes,
        )
        return Recipe((launch,))
