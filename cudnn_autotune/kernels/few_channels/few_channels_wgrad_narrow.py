"""Gradients of the weight for few channels and few filters, with stride 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.cost_model import busiest_clocks, occupancy
from cudnn_autotune.kernels.few_channels.few_channels_rows import Rows
from cudnn_autotune.kernels.sources import source
from cudnn_autotune.kernels.sum_parts import sum_launch, sums_bytes

_SOURCES = ("few_channels_rows.cuh", "few_channels_wgrad_narrow.cu")
_MOST_FILTERS = 32
_MOST_PRODUCTS = 3
"""Bound of the products, in those of few_channels_wgrad.cu."""
_MOST_SUMS = 112
"""Registers of a thread for sums."""
_MOST_ROWS = 16
_PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Parts of the depths of a sample."""
_MOST_BLOCKS = 6
_LEAST_BLOCKS = 16
_MOST_OFFERS = 3
_OTHER_REGISTERS = 56
"""Registers of a thread besides the sums and the fragments, estimated."""
_CLOCKS_OF_A_PRODUCT = 2
_BYTES_OF_A_CLOCK = 22
"""Estimated bytes per clock of a multiprocessor from the L2 cache."""
_INSTRUCTIONS_OF_A_CLOCK, _INSTRUCTIONS_OF_A_WARP = 2.6, 0.17
"""Estimated most instructions of a clock, of a multiprocessor and of one of its warps."""
_INSTRUCTIONS_OF_A_ROUNDING = 2
"""Instructions that round a number to TF32."""
_CLOCKS_OF_A_ROW, _CLOCKS_OF_A_STEP, _CLOCKS_OF_A_COPY = 40, 500, 1500
"""Estimated clocks, without another bound, in which a warp goes down a row, and more of a block:
those of a step, and those of a copy that it waits for."""


@dataclass(frozen=True)
class NarrowTiling:
    """The division of a problem among blocks and warps."""

    depths: int
    """Depths of the output along which a block goes with a tile; 1 for images."""
    rows: int
    """Rows of output pixels in a block's tile."""
    columns: int
    """Columns of a tile."""
    filters: int
    """Filters of a block."""
    warps: int
    blocks: int
    """Intended resident blocks of a multiprocessor."""

    @property
    def settings(self) -> str:
        return (
            f"DEPTHS={self.depths},ROWS={self.rows},COLUMNS={self.columns},"
            f"FILTERS={self.filters},WARPS={self.warps},BLOCKS={self.blocks}"
        )


@dataclass(frozen=True)
class _Geometry(Rows):
    """Sizes by the names in few_channels_wgrad_narrow.cu. In shared memory each channel is a plane,
    as in a contiguous image."""

    @property
    def is_planar(self) -> bool:
        return True

    @property
    def is_contiguous(self) -> bool:
        return self.problem.memory_format == torch.contiguous_format

    @property
    def sides(self) -> int:
        return min(2, self.kernel[2])

    @property
    def shifts(self) -> int:
        return -(-self.kernel[2] // 2)

    @cached_property
    def depth_rows(self) -> int:
        """Rows of the left matrix of a depth: whole eights, unless products are more with them."""
        rows = self.problem.input_shape[1] * self.shifts
        eights = -(-rows // 8) * 8
        products = [-(-self.kernel[0] * n // 16) for n in (rows, eights)]
        return eights if products[0] == products[1] else rows

    @cached_property
    def m_tiles(self) -> int:
        return -(-self.kernel[0] * self.depth_rows // 16)

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 4 * self.pair

    @property
    def group(self) -> int:
        """Pixels of an mma."""
        return 8 * self.pair

    @property
    def all_columns(self) -> int:
        """Columns of pixels of either side, from the first element of a word of the image on."""
        return self.output[2] + self.left % self.pair + self.sides - 1

    def image_pitch(self, columns: int) -> int:
        return -(-(self.left + columns + 2 * self.shifts - 2) // 8) * 8

    def image_plane(self, tiling: NarrowTiling) -> int:
        least = (tiling.rows + self.kernel[1] - 1) * self.image_pitch(tiling.columns)
        # A plane's words that are loaded together lie beside those of the next one.
        words = 4 + 2 * (self.shifts - 1) // self.pair
        return self._plane(least, -(-words // 4) * 4)

    def gradient_row(self, columns: int) -> int:
        return columns + 2 * self.vector

    def gradient_plane(self, tiling: NarrowTiling) -> int:
        return self._plane(tiling.rows * self.gradient_row(tiling.columns), 8)

    def _plane(self, least: int, apart: int) -> int:
        """Returns the elements of a plane: ``apart`` words more than a multiple of 32 words."""
        return least + (self.pair * apart - least) % (32 * self.pair)

    def shared_bytes(self, tiling: NarrowTiling) -> int:
        gradients = 2 * tiling.filters * self.gradient_plane(tiling)
        depths = self.kernel[0] + 1
        image = self.problem.input_shape[1] * depths * self.image_plane(tiling)
        tiles = self.problem.dtype.itemsize * (image + gradients)
        return max(tiles, 4 * tiling.filters * math.prod(self.problem.weight_shape[1:]))

    def tiles(self, tiling: NarrowTiling) -> tuple[int, int, int]:
        """Returns the tiles along the output's rows and columns, and all tiles."""
        depth, p, _ = self.output
        tiles_p, tiles_q = -(-p // tiling.rows), -(-self.all_columns // tiling.columns)
        return (
            tiles_p,
            tiles_q,
            self.problem.output_shape[0] * -(-depth // tiling.depths) * tiles_p * tiles_q,
        )


def narrow_tilings(problem: ConvProblem, gpu: Gpu) -> Sequence[NarrowTiling]:
    """Returns the tilings worth a measurement, the best guess first.

    Args:
        problem: a wgrad of images or volumes that few_channels_rows.py's kernels compute.
    """
    geometry = _Geometry(problem)
    filters, *window = problem.weight_shape
    if geometry.stride[1:] != (1, 1) or filters > _MOST_FILTERS:
        return ()
    # Products for as many pixels, and those of the kernel for more filters.
    products = geometry.kernel[1] * geometry.m_tiles * -(-filters // 4)
    if products >= _MOST_PRODUCTS * -(-filters // 16) * -(-math.prod(window) // 8):
        return ()
    found = sorted((_clocks(geometry, t, gpu), t.settings, t) for t in _tilings(geometry, gpu))
    distinct: dict[int, NarrowTiling] = {}
    for *_, t in found:
        distinct.setdefault(t.blocks, t)
    return tuple(distinct.values())[:_MOST_OFFERS]


def narrow_workspace_bytes(problem: ConvProblem, tiling: NarrowTiling, gpu: Gpu) -> int:
    return sums_bytes(problem, _grid(_Geometry(problem), tiling, gpu)[0])


def build_narrow(problem: ConvProblem, tiling: NarrowTiling, gpu: Gpu) -> Recipe:
    """Returns the launches of a tiling."""
    geometry = _Geometry(problem)
    channels, filters = problem.input_shape[1], problem.weight_shape[0]
    # Elements of a copy, or of a load of pixels.
    copy = geometry.copy if geometry.is_contiguous else Rows(problem).copy
    defines = {
        **geometry.defines,
        "COPY": copy,
        "GRADIENT_COPY": math.gcd(problem.output_shape[-1] * filters, geometry.vector),
        "PIXEL": channels,
        "IS_PLANAR": int(geometry.is_contiguous),
        "IS_SHIFTED": int(
            geometry.is_contiguous and problem.output_shape[-1] % geometry.vector != 0
        ),
        "DEPTHS": tiling.depths,
        "TILE_P": tiling.rows,
        "TILE_Q": tiling.columns,
        "PITCH": geometry.image_pitch(tiling.columns),
        "IMAGE_PLANE": geometry.image_plane(tiling),
        "GRADIENT_PLANE": geometry.gradient_plane(tiling),
        "FILTERS": tiling.filters,
        "DEPTH_ROWS": geometry.depth_rows,
        "M_TILES": geometry.m_tiles,
        "N_TILES": -(-tiling.filters // 4),
        "WARPS": tiling.warps,
        "BLOCKS": tiling.blocks,
        "SHARED_BYTES": geometry.shared_bytes(tiling),
    }
    blocks_x, blocks_y = _grid(geometry, tiling, gpu)
    add = KernelLaunch(
        Kernel(source(__package__, *_SOURCES), "few_channels_wgrad", tuple(defines.items())),
        grid=(blocks_x, blocks_y, 1),
        block=(32 * tiling.warps, 1, 1),
        arguments=(
            Address("x"),
            Address("y"),
            Address("workspace"),
            *geometry.sizes,
            *geometry.tiles(tiling),
        ),
        shared_bytes=geometry.shared_bytes(tiling),
    )
    return Recipe((add, sum_launch(problem, blocks_x)), sums_bytes(problem, blocks_x))


def _grid(geometry: _Geometry, tiling: NarrowTiling, gpu: Gpu) -> tuple[int, int]:
    """Returns the blocks that share the tiles, and blocks along the filters."""
    blocks_y = -(-geometry.problem.weight_shape[0] // tiling.filters)
    resident = gpu.multiprocessors * tiling.blocks // blocks_y
    tiles = geometry.tiles(tiling)[2]
    return min(tiles, max(1, resident), worthwhile_blocks(geometry.problem)), blocks_y


def worthwhile_blocks(problem: ConvProblem) -> int:
    """Returns the most blocks that share the tiles: their sums should not have more bytes than the
    operands."""
    numbers = math.prod(problem.input_shape) + math.prod(problem.output_shape)
    operands = problem.dtype.itemsize * numbers
    return max(_LEAST_BLOCKS, operands // (4 * math.prod(problem.weight_shape)))


def _tilings(geometry: _Geometry, gpu: Gpu) -> Iterator[NarrowTiling]:
    channels, filters = geometry.problem.input_shape[1], geometry.problem.weight_shape[0]
    kernel_d, kernel_h, _ = geometry.kernel
    z, p, _ = geometry.output
    # Blocks along filters would copy pixels of all filters.
    parts_y = range(1, 5) if geometry.is_contiguous else (1,)
    of_a_block = next((k for k in (-(-filters // n) for n in parts_y) if _sums(geometry, k)), 0)
    if not of_a_block:
        return
    registers = _sums(geometry, of_a_block) + 4 * geometry.m_tiles + _OTHER_REGISTERS
    registers += 2 * kernel_h * -(-of_a_block // 4)
    if not geometry.is_contiguous:
        registers = max(registers, 4 * max(channels, filters) + _OTHER_REGISTERS)
    # A block that goes from a depth to the next one copies their common part once.
    is_going = kernel_d > 1 and geometry.stride[0] == 1
    depths = {-(-z // n) for n in (_PARTS if is_going else (z,))}
    groups = -(-geometry.all_columns // geometry.group)
    widths = {geometry.group * -(-groups // -(-groups // most)) for most in (4, 8, 12, 16, 24, 32)}
    # Multiples of a window's rows, so that it is known which rows of a tile have which ones.
    heights = range(min(p, kernel_h), min(p, _MOST_ROWS) + 1, kernel_h)
    for depth, columns, rows, warps in product(depths, widths, heights, range(3, 9)):
        turns = -(-columns // (geometry.group * warps))
        if warps > 3 and turns == -(-columns // (geometry.group * (warps - 1))):
            continue  # fewer warps take as many turns
        tiling = NarrowTiling(depth, rows, columns, of_a_block, warps, 0)
        shared = geometry.shared_bytes(tiling)
        blocks = min(_MOST_BLOCKS, occupancy(gpu, 32 * warps, registers, shared))
        if blocks:
            yield replace(tiling, blocks=blocks)


def _sums(geometry: _Geometry, filters: int) -> int:
    """Returns the registers of a thread for sums; 0 if they are too many."""
    sums = 4 * geometry.kernel[1] * geometry.m_tiles * -(-filters // 4)
    return sums if sums <= _MOST_SUMS else 0


def _clocks(geometry: _Geometry, tiling: NarrowTiling, gpu: Gpu) -> float:
    """Estimates the clocks of the busiest multiprocessor."""
    kernel_d, kernel_h, _ = geometry.kernel
    blocks_x, blocks_y = _grid(geometry, tiling, gpu)
    resident = -(-blocks_x * blocks_y // gpu.multiprocessors)
    n_tiles = -(-tiling.filters // 4)
    height = tiling.rows + kernel_h - 1
    # A warp goes down a tile with these.
    loads = 4 * geometry.m_tiles * height + 2 * geometry.pair * n_tiles * tiling.rows
    products = kernel_h * geometry.m_tiles * n_tiles * tiling.rows
    instructions = loads + products + (6 * n_tiles + 4) * height + 60
    if geometry.pair == 1:
        instructions += _INSTRUCTIONS_OF_A_ROUNDING * loads
    of_all_warps = _INSTRUCTIONS_OF_A_WARP * tiling.warps * resident
    of_a_clock = min(_INSTRUCTIONS_OF_A_CLOCK, of_all_warps)
    bounds = loads, _CLOCKS_OF_A_PRODUCT * products, instructions / of_a_clock
    groups = tiling.columns // geometry.group
    turns = -(-groups // tiling.warps)
    # A step: a depth of a tile.
    copied = tiling.depths + kernel_d - 1 if tiling.depths > 1 else kernel_d
    image = geometry.problem.input_shape[1] * height * geometry.image_pitch(tiling.columns)
    elements: float = image * copied / tiling.depths
    elements += tiling.filters * tiling.rows * geometry.gradient_row(tiling.columns)
    copying = elements / geometry.vector / 32 * (20 if geometry.is_contiguous else 40)
    computing = groups * max(bounds) + copying / of_a_clock
    moving = geometry.problem.dtype.itemsize * elements / _BYTES_OF_A_CLOCK
    busy = max(computing, moving) + min(computing, moving) / (1 + resident)
    latency: float = turns * (_CLOCKS_OF_A_ROW * height + instructions) + _CLOCKS_OF_A_STEP
    latency += 4 * copying / tiling.warps
    if tiling.depths == 1 < kernel_d:
        latency += _CLOCKS_OF_A_COPY
    steps = -(-geometry.tiles(tiling)[2] // blocks_x) * tiling.depths
    return busiest_clocks(resident * steps, busy, steps, latency)
