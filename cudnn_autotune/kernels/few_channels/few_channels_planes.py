"""Forward convolutions on tensor cores of contiguous tensors with few input or output channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.cost_model import busiest_clocks, occupancy
from cudnn_autotune.kernels.family import KernelFamily, epilogue_macros, operands
from cudnn_autotune.kernels.few_channels.few_channels_rows import Rows, forward_view, is_computed
from cudnn_autotune.kernels.sources import source, version_of

_SOURCES = ("few_channels_rows.cuh", "few_channels_pairs.cuh", "few_channels_planes.cu")
_WARPS = 8
_MOST_ROWS = 16
_MOST_PIXELS, _MOST_PIXELS_3D = 512, 2048
"""Output pixels of a tile. In 3-d a smaller tile copies much more than it computes with."""
_LEAST_COLUMNS = 16
"""Least columns of an output for vectors along rows."""
_MOST_BLOCKS = 4
_MOST_WEIGHT_REGISTERS, _MOST_REGISTERS = 128, 240
_OTHER_REGISTERS = 40
"""Registers per thread besides the weights and the sums, estimated."""
_BYTES_OF_A_CLOCK = 13
"""Estimated bytes per clock of a multiprocessor from and to memory."""
_INSTRUCTIONS_OF_A_CLOCK = 2.5
_INSTRUCTIONS_OF_A_TILE = 250 * _WARPS
"""Instructions of a block besides those for pixels, estimated."""
_CLOCKS_OF_A_TILE = 1000
"""Estimated clocks from one tile of a block to its next one, without another bound."""
_MOST_OFFERS = 4


@dataclass(frozen=True)
class _Tiling:
    """The division of a problem among blocks and warps."""

    rows: int
    """Rows of output pixels in a block's tile."""
    columns: int
    """Columns of output pixels in a block's tile."""
    warps_c: int
    """Warps of a block with channels of their own; others share the pixels."""
    m_tiles: int
    """Sixteens of output channels of a warp; eights of two pixels if paired."""
    n_tiles: int
    """Its simultaneous eights of pixels, or of pairs of them."""
    blocks: int
    """Intended resident blocks of a multiprocessor."""
    is_paired: bool
    """Whether a column of a product is two neighbouring pixels."""

    @property
    def channels(self) -> int:
        """Output channels of a block."""
        return self.warp_channels * self.warps_c

    @property
    def warp_channels(self) -> int:
        return 16 // self.side * self.m_tiles

    @property
    def side(self) -> int:
        """Pixels of a column of a product."""
        return 1 + self.is_paired

    @property
    def settings(self) -> str:
        return (
            f"ROWS={self.rows},COLUMNS={self.columns},CHANNELS={self.channels},"
            f"WARP_CHANNELS={self.warp_channels},PIXELS={8 * self.side * self.n_tiles},"
            f"BLOCKS={self.blocks},PAIRED={int(self.is_paired)}"
        )


@dataclass(frozen=True)
class _Geometry(Rows):
    """Sizes by the names in few_channels_planes.cu."""

    is_paired: bool

    @property
    def can_be_paired(self) -> bool:
        """Whether windows of neighbouring pixels have pairs of elements in common."""
        return self.pair == 2 and self.row > self.pixel_step

    @property
    def leads(self) -> int:
        """Elements before the window of the last pixel of a column."""
        return self.left % 2 + self.pixel_step if self.is_paired else 0

    @cached_property
    def row_pairs(self) -> int:
        return -(-(self.row + self.leads) // self.pair)

    @cached_property
    def registers(self) -> int:
        return -(-self.planes * self.kernel[1] * self.row_pairs // 4)

    @cached_property
    def is_odd(self) -> bool:
        is_even = self.pixel_step % 2 == 0 and self.left % 2 == 0
        return self.pair == 2 and not is_even and not self.is_paired

    def tile_pitch(self, columns: int) -> int:
        pitch = self.pitch(columns, self.pair * (self.row_pairs + self.is_odd))
        # Nine or more words of a row are loaded together with those of the next one.
        while self.is_paired and not 12 <= pitch // 2 % 32 <= 20:
            pitch += 8
        return pitch

    def tile_bytes(self, rows: int, columns: int) -> int:
        height = (rows - 1) * self.stride[1] + self.kernel[1]
        return self.planes * height * self.tile_pitch(columns) * self.problem.dtype.itemsize

    def staged(self, tiling: _Tiling) -> int:
        """Returns the output channels of a block, of those that there are in the first one."""
        return min(tiling.channels, self.problem.output_shape[1])

    def shared_bytes(self, tiling: _Tiling) -> int:
        stage_pitch = -(-tiling.columns // 64) * 64 + 8
        stage = tiling.rows * self.staged(tiling) * stage_pitch * self.problem.dtype.itemsize
        return 2 * self.tile_bytes(tiling.rows, tiling.columns) + stage


class FewChannelsPlanes(KernelFamily[_Tiling]):
    """Implicit GEMM for first and last layers: float16, bfloat16 and TF32, contiguous, 1-d to
    3-d, no dilation, no groups. They have 1 to 16 input channels, or 1 to 8 output channels. It
    computes gradients of the input of such layers with stride 1, too."""

    name = "few_channels_planes"
    version = version_of(__name__)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        view = forward_view(problem)
        if view is None or view.output_shape[-1] < _LEAST_COLUMNS:
            return ()
        if not is_computed(view, is_planar=True):
            return ()
        ranked: list[tuple[float, int, _Tiling]] = []
        for is_paired in (False, True):
            geometry = _Geometry(view, is_paired)
            if not is_paired or geometry.can_be_paired:
                found = _tilings(geometry, gpu)
                ranked += ((_clocks(geometry, t, gpu), -t.n_tiles, t) for t in found)
        ranked.sort(key=lambda one: one[:2])
        distinct: dict[tuple[int, ...], _Tiling] = {}
        for *_, t in ranked:
            distinct.setdefault((t.columns, t.channels, t.m_tiles, t.blocks, t.is_paired), t)
        best = list(distinct.values())
        # One offer is of the other kind than the best one.
        other = next((t for t in best if t.is_paired != best[0].is_paired), None)
        if other is not None and other not in best[:_MOST_OFFERS]:
            best[_MOST_OFFERS - 1] = other
        return tuple(best[:_MOST_OFFERS])

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        view = forward_view(problem)
        assert view is not None
        geometry = _Geometry(view, tiling.is_paired)
        q = view.output_shape[-1]
        tiles, blocks_y = _grid(geometry, tiling)
        defines = {
            **geometry.defines,
            "IS_PAIRED": int(tiling.is_paired),
            "LEADS": geometry.leads,
            "TILE_P": tiling.rows,
            "TILE_Q": tiling.columns,
            "PITCH": geometry.tile_pitch(tiling.columns),
            "M_TILES": tiling.m_tiles,
            "N_TILES": tiling.n_tiles,
            "WARPS_C": tiling.warps_c,
            "WARPS_Q": _WARPS // tiling.warps_c,
            "BLOCKS": tiling.blocks,
            "SHARED_BYTES": geometry.shared_bytes(tiling),
            "STAGE_CHANNELS": geometry.staged(tiling),
            "HAS_WHOLE_ROWS": int(q * problem.dtype.itemsize % 16 == 0),
            "HAS_ODD_ROWS": q % 2,
            "IS_TURNED": int(problem.op == "dgrad"),
            **dict(epilogue_macros(problem)),
        }
        resident = gpu.multiprocessors * tiling.blocks
        x, w, y = operands(problem)
        launch = KernelLaunch(
            Kernel(source(__package__, *_SOURCES), "few_channels_planes", tuple(defines.items())),
            grid=(min(tiles, max(1, resident // blocks_y)), blocks_y, 1),
            block=(32 * _WARPS, 1, 1),
            arguments=(
                *(x, w),
                Address("bias" if problem.bias else "x"),
                Address("residual" if problem.residual else "x"),
                y,
                *geometry.arguments(tiling.rows, tiling.columns),
            ),
            shared_bytes=geometry.shared_bytes(tiling),
        )
        return Recipe((launch,))


def _grid(geometry: _Geometry, tiling: _Tiling) -> tuple[int, int]:
    """Returns the tiles, and the blocks along channels."""
    *_, tiles = geometry.grid(tiling.rows, tiling.columns)
    return tiles, -(-geometry.problem.output_shape[1] // tiling.channels)


def _tilings(geometry: _Geometry, gpu: Gpu) -> Iterator[_Tiling]:
    problem = geometry.problem
    k = problem.output_shape[1]
    _, p, q = geometry.output
    most_pixels = _MOST_PIXELS_3D if problem.spatial_dims == 3 else _MOST_PIXELS
    side = 1 + geometry.is_paired
    for m_tiles, warps_c, n_tiles in product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
        weights = 2 * geometry.registers * m_tiles
        registers = weights + 4 * m_tiles * n_tiles + _OTHER_REGISTERS + 2 * m_tiles * problem.bias
        # In a block of more channels than the layer has, half of the warps would be idle.
        is_idle = m_tiles * warps_c > 1 and 8 // side * m_tiles * warps_c >= k
        if is_idle or weights > _MOST_WEIGHT_REGISTERS or registers > _MOST_REGISTERS:
            continue
        for most_columns in (128, 256, 512):
            parts = -(-q // most_columns)
            granule = 8 * side * n_tiles
            columns = -(-q // (parts * granule)) * granule
            for rows in range(1, min(p, _MOST_ROWS) + 1):
                if rows > 1 and rows * columns > most_pixels:
                    break
                tiling = _Tiling(rows, columns, warps_c, m_tiles, n_tiles, 0, geometry.is_paired)
                shared = geometry.shared_bytes(tiling)
                blocks = min(_MOST_BLOCKS, occupancy(gpu, 32 * _WARPS, registers, shared))
                if blocks:
                    yield replace(tiling, blocks=blocks)


def _clocks(geometry: _Geometry, tiling: _Tiling, gpu: Gpu) -> float:
    """Estimates the clocks of the busiest multiprocessor."""
    tiles, blocks_y = _grid(geometry, tiling)
    pixels, q = tiling.rows * tiling.columns, geometry.output[2]
    # For eight pixels, or pairs, a warp issues products and their loads, and more.
    loads = 1 if tiling.is_paired else 2 + 1.5 * geometry.is_odd
    products = geometry.registers * (tiling.m_tiles / 2 + loads)
    # For either half of a product it stages sums, if channels are there; it looks for NaN in pairs.
    channels = geometry.staged(tiling)
    halves = min(2 * tiling.m_tiles, -(-channels // 8) * tiling.side)
    staging = halves * (6 if q % 2 else 4) + 4 * tiling.is_paired
    eights = pixels // (8 * tiling.side)
    computing = eights * tiling.warps_c * (products + staging + 25 / tiling.n_tiles)
    # It issues these for a row, or for two.
    lanes = 16 if tiling.columns < 256 else 32
    of_rows = 12 * -(-tiling.columns // (8 * lanes)) + (28 if q % 8 else 10)
    storing = tiling.rows * channels * lanes / 32 * of_rows
    size = geometry.problem.dtype.itemsize
    image = geometry.tile_bytes(tiling.rows, tiling.columns)
    # A thread copies the same elements of all planes.
    copying = image / geometry.planes / (32 * size * geometry.copy) * (25 + 5 * geometry.planes)
    instructions = computing + storing + copying + _INSTRUCTIONS_OF_A_TILE
    # Blocks of other channels read the same image, from the L2 cache.
    moved = size * pixels * channels + image / blocks_y
    times = (instructions / _INSTRUCTIONS_OF_A_CLOCK, moved / _BYTES_OF_A_CLOCK)
    # More blocks compute while others store.
    busy = max(times) + min(times) / (1 + tiling.blocks)
    turns = -(-tiles // max(1, gpu.multiprocessors * tiling.blocks // blocks_y))
    return busiest_clocks(turns * tiling.blocks, busy, turns, busy + _CLOCKS_OF_A_TILE)
