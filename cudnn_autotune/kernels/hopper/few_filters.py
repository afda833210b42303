"""Convolutions with few output channels on the tensor cores of compute capability 9.0."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.cost_model import busiest_clocks, occupancy
from cudnn_autotune.kernels.family import (
    INT32_MAX,
    KernelFamily,
    addends,
    operands,
    slope,
)
from cudnn_autotune.kernels.hopper import wgmma

_ROW_BYTES = 16
"""Bytes of 8 channels."""
_POSITIONS = 64
"""Positions of a product of matrices."""
_MOST_FILTERS, _MOST_MATRIX_COLUMNS = 64, 256
# More than _MOST_FILTERS may pass through shared memory stage by stage. Without a bias, 96 filters
# of 3x3x3 took 1.02 to 1.15 times cuDNN's time so on an H200. 2-d layers and 64 filters took more.
_MOST_DEEP_FILTERS = 120
"""Most filters of several depths."""
_MOST_FILTER_COLUMNS = 9
"""Most columns of a filter: a warp needs 8 of the next one's 16 positions."""
_MOST_WARPGROUPS, _MOST_MATRICES = 4, 3
_WINDOW_COLUMNS = (8, 16, 32, 64)
_STAGES, _STREAMED_STAGES = (3, 2), (4, 3, 2)
_MOST_PLANES = 10
"""Most planes of a stage."""
_MOST_OFFERS = 2
_OTHER_REGISTERS, _MORE_REGISTERS = 64, 24
"""Registers of a thread beside its sums, and further ones if a stage has many products."""
_FEW_PRODUCTS = 12
"""Most products of a warpgroup in a stage without further registers."""
_MOST_RESIDENT = 4
# The numbers below were fitted to the times of tilings of nine layers on an H200.
_PRODUCT_FACTOR = 1.33
"""Ratio of a product's clocks to its bound."""
_WINDOW_ROW_CLOCKS, _FILTER_ROW_CLOCKS = 0.44, 0.57
"""Clocks of a block to issue the copy of 16 bytes."""
_BYTES_A_CLOCK = 12.6
"""Copied bytes of inputs and outputs of a multiprocessor in a clock, while all copy."""
_STORE_CLOCKS, _EIGHT_CLOCKS = 900, 39
"""Clocks to add and store the sums of a tile: at least, and for each 64 positions and 8 filters."""
# The two numbers for streamed filters are estimates that no measurement was fitted to.
_STREAMED_BYTES_A_CLOCK = 24
"""Copied bytes of a multiprocessor in a clock, mostly from the level 2 cache."""
_STAGE_CLOCKS = 150
"""Clocks between the products of two stages."""
_LATENCY = 3300
"""Clocks of a block before its first product and behind its last one."""


@dataclass(frozen=True)
class _Layer:
    """A problem in the kernel's terms: "in" is x, and "out" y; for dgrad they are y and x."""

    is_dgrad: bool
    images: int
    in_size: tuple[int, ...]
    """Depth, height and width, here and in ``out_size``; a depth of 1 in 2-d."""
    in_channels: int
    in_stride: int
    """Elements from a pixel to the next one, here and in ``out_stride``."""
    out_size: tuple[int, ...]
    out_channels: int
    out_stride: int
    depths: int
    """Depths of a filter; 1 in 2-d."""
    rows: int
    columns: int
    dilation: tuple[int, ...]
    """Dilation of the filter's depths and of its rows; its columns have none."""
    first: tuple[int, ...]
    """Depth, row and column of the input at the begin of the first output's filter."""

    @property
    def out_width(self) -> int:
        """Output channels in a matrix, rounded up to a multiple of 8."""
        return -(-self.out_channels // 8) * 8


def _layer_of(problem: ConvProblem) -> _Layer | None:
    """Returns the problem in the kernel's terms, or None if it does not compute it."""
    dims = problem.spatial_dims
    if not (
        problem.op != "wgrad"
        and dims in (2, 3)
        and problem.memory_format == CHANNELS_LAST[dims]
        and problem.groups == 1
        and problem.dtype in (torch.float16, torch.bfloat16)
        and set(problem.stride) == {1}
        and problem.dilation[-1] == 1
        and min(problem.alignment) >= _ROW_BYTES
    ):
        return None
    flat = dims == 2
    k, c = problem.weight_shape[:2]
    depths, rows, columns = (1,) * flat + problem.weight_shape[2:]
    x = (1,) * flat + problem.input_shape[2:]
    y = (1,) * flat + problem.output_shape[2:]
    padding = (0,) * flat + problem.padding[:dims]
    dilation = (1,) * flat + problem.dilation
    in_stride, out_stride = problem.pixel_strides or (c, k)
    first = tuple(-p for p in padding)
    is_dgrad = problem.op == "dgrad"
    if is_dgrad:
        x, y, c, k, in_stride, out_stride = y, x, k, c, k, c
        reach = ((n - 1) * d for n, d in zip((depths, rows, columns), dilation, strict=True))
        first = tuple(p - r for p, r in zip(padding, reach, strict=True))
    # Layers of one row are left to ``implicit_gemm_1d``.
    if not (
        depths * rows > 1
        and 1 < columns <= _MOST_FILTER_COLUMNS
        and c % 16 == 0
        and (k % 8 == 0 or not (is_dgrad or problem.residual))
        and k <= (_MOST_FILTERS if depths == 1 else _MOST_DEEP_FILTERS)
    ):
        return None
    beyond = max(depths, rows) * max(dilation) + max(map(abs, first))
    if max(*x, *y) + beyond > INT32_MAX // 2:
        return None
    return _Layer(
        *(is_dgrad, problem.input_shape[0], x, c, in_stride, y, k, out_stride),
        *(depths, rows, columns, dilation[:2], first),
    )


@dataclass(frozen=True)
class _Tiling:
    """The division of a layer among blocks and warpgroups."""

    layer: _Layer
    warpgroups: int
    rows: int
    """Rows of output pixels in a block's tile."""
    columns: int
    """Columns of output pixels in a block's tile."""
    window_columns: int
    """Positions from one row of the window to the next."""
    planes: int
    """Eights of input channels of a stage."""
    stages: int
    matrices: int = 0
    """Matrices of positions of a warpgroup whose filters are streamed; 0 if they stay."""

    @property
    def settings(self) -> str:
        streamed = f",MATRICES={self.matrices}" if self.matrices else ""
        return (
            f"WARPGROUPS={self.warpgroups},ROWS={self.rows},COLUMNS={self.columns},"
            f"PLANES={self.planes},STAGES={self.stages}{streamed}"
        )

    @property
    def beside(self) -> int:
        """Columns of a filter in a matrix."""
        return 1 if self.matrices else self.layer.columns

    @property
    def apart(self) -> int:
        """Matrices of a row of the filter."""
        return self.layer.columns // self.beside

    @property
    def matrix_columns(self) -> int:
        return self.beside * self.layer.out_width

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def chunks(self) -> int:
        """Stages of a tile for each depth of the filters."""
        return self.layer.in_channels // (8 * self.planes)

    @property
    def tiles_down(self) -> int:
        return -(-self.layer.out_size[1] // self.rows)

    @property
    def tiles_across(self) -> int:
        return -(-self.layer.out_size[2] // self.columns)

    @property
    def tiles(self) -> int:
        depths = self.layer.images * self.layer.out_size[0]
        return depths * self.tiles_down * self.tiles_across

    @property
    def positions(self) -> int:
        """Positions of the input in a stage: the window's, and the last matrix's rows behind it."""
        layer = self.layer
        below = (layer.rows - 1) * layer.dilation[1] * self.window_columns + self.apart - 1
        return self.warpgroups * max(self.matrices, 1) * _POSITIONS + below

    @property
    def filter_bytes(self) -> int:
        """Bytes of the filters of a stage in shared memory."""
        n = self.matrix_columns
        of_one = n // 8 * (8 * self.planes + 1) if self.layer.is_dgrad else self.planes * (n + 1)
        return self.layer.rows * self.apart * of_one * _ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        layer = self.layer
        window = self.planes * (self.positions + 1) * _ROW_BYTES
        held = self.stages if self.matrices else self.chunks * layer.depths
        scratch = 8 * (2 * layer.out_width + 16)
        exchange = 4 * (self.beside - 1) * layer.out_width
        of_warps = 4 * self.warpgroups * (scratch + exchange)
        return self.stages * window + held * self.filter_bytes + of_warps

    def resident(self, gpu: Gpu) -> int:
        """Returns the resident blocks of a multiprocessor."""
        registers = max(self.matrices, 1) * self.matrix_columns // 2 + _OTHER_REGISTERS
        if self.planes > 8 or self.layer.rows * self.planes // 2 > _FEW_PRODUCTS:
            registers += _MORE_REGISTERS
        held = occupancy(gpu, self.threads, min(registers, 255), self.shared_bytes)
        return min(held, _MOST_RESIDENT)

    def clocks(self, gpu: Gpu) -> float:
        """Estimates the clocks of the busiest multiprocessor.

        A block copies, multiplies and stores one after the other, at the same time as other blocks.
        """
        layer, n = self.layer, self.matrix_columns
        matrices = self.warpgroups * max(self.matrices, 1)
        products = matrices * layer.depths * layer.rows * self.apart * layer.in_channels / 16
        multiplying = products * max(n / 2, 16 + n / 4) * _PRODUCT_FACTOR
        copied = layer.depths * self.positions * layer.in_channels // 8
        of_filters = self.chunks * layer.depths * self.filter_bytes // _ROW_BYTES
        copying = copied * _WINDOW_ROW_CLOCKS
        storing = _STORE_CLOCKS + _EIGHT_CLOCKS * matrices * layer.out_width // 8
        moved = copied * _ROW_BYTES + 2 * self.rows * self.columns * layer.out_channels
        resident = self.resident(gpu)
        of_one = -(-self.tiles // (resident * gpu.multiprocessors))
        held = min(resident, -(-self.tiles // gpu.multiprocessors))
        busy = max(multiplying, copying, moved / _BYTES_A_CLOCK)
        if self.matrices:  # copies run beside the products of the stage before
            streamed = (of_filters * _ROW_BYTES + moved) / _STREAMED_BYTES_A_CLOCK
            multiplying += self.chunks * layer.depths * _STAGE_CLOCKS
            busy = max(multiplying, copying + of_filters * _FILTER_ROW_CLOCKS, streamed)
            return _LATENCY + busiest_clocks(of_one * held, busy, of_one, busy + storing)
        tiles = busiest_clocks(of_one * held, busy, of_one, copying + multiplying + storing)
        return _LATENCY + of_filters * _FILTER_ROW_CLOCKS + tiles


def _tilings(layer: _Layer, gpu: Gpu) -> list[_Tiling]:
    """Returns the tilings that keep all filters in shared memory, or else those that do not."""
    found = list(_divided(layer, gpu, 0))
    if found or layer.out_channels <= _MOST_FILTERS:
        return found
    return [one for n in range(1, _MOST_MATRICES + 1) for one in _divided(layer, gpu, n)]


def _divided(layer: _Layer, gpu: Gpu, matrices: int) -> Iterator[_Tiling]:
    planes = layer.in_channels // 8
    divisors = [n for n in range(2, _MOST_PLANES + 1, 2) if planes % n == 0]
    stages = _STREAMED_STAGES if matrices else _STAGES
    for warpgroups, window_columns in itertools.product(
        range(1, _MOST_WARPGROUPS + 1), _WINDOW_COLUMNS
    ):
        columns = _tile_columns(layer, window_columns)
        # The narrowest window is for narrow images. Of wider ones it copies much twice.
        if columns == 0 or (window_columns == 8 and columns < layer.out_size[2]):
            continue
        height = layer.out_size[1]
        rows = min(warpgroups * max(matrices, 1) * _POSITIONS // window_columns, height)
        rows = -(-height // -(-height // rows))
        for n, held in itertools.product(reversed(divisors), stages):
            found = _Tiling(layer, warpgroups, rows, columns, window_columns, n, held, matrices)
            if found.matrix_columns > _MOST_MATRIX_COLUMNS or found.shared_bytes > gpu.shared_bytes:
                continue
            if found.resident(gpu) and found.tiles <= INT32_MAX // (found.chunks * layer.depths):
                yield found
            if not matrices:
                break  # stages of fewer planes are slower


def _tile_columns(layer: _Layer, window_columns: int) -> int:
    """Returns the columns of a tile whose window has ``window_columns``; 0 if there is none."""
    width, lacking = layer.out_size[2], layer.columns - 1
    padding = -layer.first[2]
    # Columns beyond the right edge may be the next row's beyond its left edge.
    if (
        padding >= 0
        and padding + layer.in_size[2] <= window_columns
        and width + lacking - window_columns <= padding
        and width <= window_columns
    ):
        return width
    most = window_columns - lacking
    return -(-width // -(-width // most)) if most > 0 else 0


@functools.lru_cache(maxsize=256)
def _best(layer: _Layer, gpu: Gpu) -> tuple[_Tiling, ...]:
    """Returns the tilings with the least estimates, each of another number of warpgroups."""
    found = sorted(_tilings(layer, gpu), key=lambda tiling: tiling.clocks(gpu))
    best: dict[int, _Tiling] = {}
    for tiling in found:
        best.setdefault(tiling.warpgroups, tiling)
    return tuple(best.values())[:_MOST_OFFERS]


class FewFilters(KernelFamily[_Tiling]):
    """Forward and input gradient of convolutions with few output channels by few_filters.cu.

    It computes 2-d and 3-d layers of float16 and bfloat16 in channels_last, of stride 1 and without
    groups. Filters have 2 to 9 columns and more than one row. Input channels are a multiple of 16,
    and output channels 64 at most, or 120 for filters of several depths. For dgrad those are y's
    and x's, and x's a multiple of 8. fprop has every epilogue, but no residual if the output
    channels are no multiple of 8. Input and output of fprop may be slices of the channels of larger
    tensors. A NaN or an infinity in an input reaches the outputs that depend on it, and no others.
    """

    name = "few_filters"
    version = sources.version_of(__name__)
    min_capability = (wgmma.CAPABILITY_MAJOR, 0)
    takes_slices = True
    takes_slope = True

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        if gpu.compute_capability[0] != wgmma.CAPABILITY_MAJOR:
            return ()
        layer = _layer_of(problem)
        return () if layer is None else _best(layer, gpu)

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        layer, resident = tiling.layer, tiling.resident(gpu)
        columns = tiling.matrix_columns
        defines: dict[str, str | int] = {
            "ELEMENT": sources.ELEMENTS[problem.dtype],
            "DGRAD": int(layer.is_dgrad),
            "OUT": layer.out_width,
            "OUT_CHANNELS": layer.out_channels,
            "WINDOW_COLUMNS": tiling.window_columns,
            "FILTER_DEPTHS": layer.depths,
            "FILTER_ROWS": layer.rows,
            "FILTER_COLUMNS": layer.columns,
            "WARPGROUPS": tiling.warpgroups,
            "PLANES": tiling.planes,
            "CHUNKS": tiling.chunks,
            "STREAMED": int(tiling.matrices > 0),
            "MATRICES": max(tiling.matrices, 1),
            "STAGES": tiling.stages,
            "BLOCKS": resident,
            "MULTIPLY": f"multiply_{columns}",
            **dict(sources.activation_macros(problem.activation)),
        }
        source = wgmma.source(columns) + sources.text(__package__, "few_filters.cu")
        tiles = -(-tiling.tiles // (resident * gpu.multiprocessors))
        launch = KernelLaunch(
            Kernel(source, "few_filters", tuple(defines.items()), wgmma.ARCH_SUFFIX),
            grid=(-(-tiling.tiles // tiles), 1, 1),
            block=(tiling.threads, 1, 1),
            arguments=(
                *operands(problem),
                *addends(problem),
                slope(problem),
                *(*layer.in_size, layer.in_stride, *layer.out_size, layer.out_stride),
                *(*layer.first, *layer.dilation),
                *(tiling.rows, tiling.columns, tiling.tiles, tiles, tiling.positions),
            ),
            shared_bytes=tiling.shared_bytes,
        )
        return Recipe((launch,))
