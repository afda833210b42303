"""Forward convolutions of channels_last images with few channels, on tensor cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.family import KernelFamily, epilogue_macros, operands
from cudnn_autotune.kernels.few_channels.few_channels_rows import Rows, forward_view, is_computed
from cudnn_autotune.kernels.sources import source, version_of

_SOURCES = ("few_channels_rows.cuh", "few_channels_pairs.cuh", "few_channels.cu")
_MOST_ROWS, _MOST_COLUMNS = 16, 128
"""Limits of a tile, in output pixels. In an output of height 1 it has up to 8 times the columns."""
_BYTES_OF_A_CLOCK = 16
"""Estimated bytes per clock of a multiprocessor from and to memory."""
_CLOCKS_OF_A_TILE = 300
"""Estimated further clocks of a tile."""
_MOST_OFFERS = 5
_WARPS = 8
_OTHER_REGISTERS, _RESIDUAL_REGISTERS = 28, 8
"""Registers per thread besides the weights, the sums and the image's fragments, as in cubins."""
_MOST_REGISTERS = 240
_MOST_ELEMENTS = 512
"""Most elements in the registers of eight channels. A larger window is a matrix for cuDNN."""


@dataclass(frozen=True)
class _Tiling:
    rows: int
    """Rows of output pixels in a block's tile."""
    columns: int
    """Columns of output pixels in a block's tile."""
    n_tiles: int
    """Eights of output channels of a warp."""
    m_tiles: int
    """Its simultaneous groups of 16 pixels."""
    blocks: int
    """Intended resident blocks of a multiprocessor."""

    @property
    def settings(self) -> str:
        return (
            f"ROWS={self.rows},COLUMNS={self.columns},CHANNELS={8 * self.n_tiles},"
            f"PIXELS={16 * self.m_tiles},BLOCKS={self.blocks}"
        )


@dataclass(frozen=True)
class _Geometry(Rows):
    """Geometry, by the names in few_channels.cu."""

    @property
    def phases(self) -> int:
        return 1 + self.pixel_step % self.pair

    @property
    def leads(self) -> int:
        return 1 if self.phases == 2 else self.left % self.pair

    @property
    def row_pairs(self) -> int:
        return -(-(self.row + self.leads) // self.pair)

    @property
    def registers(self) -> int:
        return -(-self.planes * self.kernel[1] * self.row_pairs // 4)

    def tile_pitch(self, columns: int) -> int:
        return self.pitch(columns, self.pair * self.row_pairs)

    def tile_bytes(self, settings: _Tiling) -> int:
        height = (settings.rows - 1) * self.stride[1] + self.kernel[1]
        pitch = self.tile_pitch(settings.columns)
        return self.planes * height * pitch * self.problem.dtype.itemsize

    def shared_bytes(self, settings: _Tiling) -> int:
        tile = self.tile_bytes(settings)
        words = (4 * self.registers + 3) // 8 * 8 + 4
        channels = _warps(self.problem, settings)[1] * 8 * settings.n_tiles
        biases = 4 * channels * self.problem.bias
        return 2 * tile + self.phases * channels * words * 4 + biases


def _eights(problem: ConvProblem) -> int:
    """Returns the eights of output channels, the last of which may not be whole."""
    return -(-problem.weight_shape[0] // 8)


def _warps(problem: ConvProblem, settings: _Tiling) -> tuple[int, int]:
    """Returns the warps of a block along pixels and along channels."""
    groups = _eights(problem) // settings.n_tiles
    along_channels = next(n for n in (4, 3, 2, 1) if groups % n == 0)
    return _WARPS // along_channels, along_channels


def _grid(geometry: _Geometry, settings: _Tiling) -> tuple[int, int]:
    """Returns the tiles, and the blocks along channels."""
    problem = geometry.problem
    along_channels = _warps(problem, settings)[1] * settings.n_tiles
    *_, tiles = geometry.grid(settings.rows, settings.columns)
    return tiles, _eights(problem) // along_channels


class FewChannels(KernelFamily[_Tiling]):
    """Implicit GEMM for first layers: float16, bfloat16 and TF32, channels_last, 2-d and 3-d, 1 to
    16 input channels, no dilation, no groups. With stride 1 it computes gradients of the input, if
    the output has 1 to 16 channels."""

    name = "few_channels"
    version = version_of(__name__)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        view = forward_view(problem)
        if view is None or not is_computed(view):
            return ()
        geometry = _Geometry(view)
        if 4 * geometry.pair * geometry.registers > _MOST_ELEMENTS:
            return ()
        found = []
        for n_tiles in range(1, 9):
            for m_tiles in (1, 2):
                used = n_tiles * geometry.registers + m_tiles * (4 * n_tiles + 4)
                used += _OTHER_REGISTERS + _RESIDUAL_REGISTERS * problem.residual
                if _eights(view) % n_tiles == 0 and used <= _MOST_REGISTERS:
                    blocks = min(4, gpu.sm_registers // (32 * _WARPS * used))
                    found.append(_tiled(n_tiles, m_tiles, blocks, view, gpu))
        # Enough warps hide latencies, and each fragment of the image should have many products.
        found.sort(
            key=lambda s: (
                s.n_tiles > 1,
                min(s.blocks, 2),
                min(s.n_tiles, 4),
                s.m_tiles,
                -s.n_tiles,
            ),
            reverse=True,
        )
        best = [s for s in found if s.n_tiles > 1 or found[0].n_tiles == 1][: _MOST_OFFERS - 1]
        if best and best[0].rows > 1:
            best.append(replace(best[0], rows=-(-best[0].rows // 2)))
        elif best and best[0].columns > _MOST_COLUMNS:
            best.append(replace(best[0], columns=_columns(geometry, best[0].columns // 2)))
        return tuple(s for s in best if s.blocks > 0)

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        view = forward_view(problem)
        assert view is not None
        geometry = _Geometry(view)
        tiles, blocks_y = _grid(geometry, tiling)
        warps_m, warps_n = _warps(view, tiling)
        filters, most = view.weight_shape[0], 4 * geometry.pair
        x, w, y = operands(problem)
        defines = {
            **geometry.defines,
            "LEADS": geometry.leads,
            "TILE_P": tiling.rows,
            "TILE_Q": tiling.columns,
            "PITCH": geometry.tile_pitch(tiling.columns),
            "N_TILES": tiling.n_tiles,
            "M_TILES": tiling.m_tiles,
            "WARPS_M": warps_m,
            "WARPS_N": warps_n,
            "BLOCKS": tiling.blocks,
            "STORE": math.gcd(filters, 2 * tiling.n_tiles, most),
            "IS_RAGGED": int(filters % 8 != 0),
            "IS_TURNED": int(problem.op == "dgrad"),
            "SHARED_BYTES": geometry.shared_bytes(tiling),
            **dict(epilogue_macros(problem)),
        }
        resident = gpu.multiprocessors * tiling.blocks
        launch = KernelLaunch(
            Kernel(source(__package__, *_SOURCES), "few_channels", tuple(defines.items())),
            grid=(min(tiles, max(1, resident // blocks_y)), blocks_y, 1),
            block=(32 * warps_m * warps_n, 1, 1),
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


def _tiled(n_tiles: int, m_tiles: int, blocks: int, problem: ConvProblem, gpu: Gpu) -> _Tiling:
    """Returns the settings with a tile, and fewer blocks a multiprocessor if their shared memory
    does not fit."""
    geometry = _Geometry(problem)
    p = geometry.output[1]
    most = [_MOST_COLUMNS << i for i in range(4)] if p == 1 else [_MOST_COLUMNS]
    widths = dict.fromkeys(_columns(geometry, columns) for columns in most)
    while blocks > 0:
        of_a_block = gpu.sm_shared_bytes // blocks - gpu.reserved_shared_bytes
        fitting = [
            settings
            for columns, rows in product(widths, range(1, min(p, _MOST_ROWS) + 1))
            if geometry.shared_bytes(settings := _Tiling(rows, columns, n_tiles, m_tiles, blocks))
            <= of_a_block
        ]
        if fitting:
            return min(fitting, key=lambda s: _clocks(problem, s, gpu))
        blocks -= 1
    return _Tiling(1, min(widths), n_tiles, m_tiles, 0)


def _columns(geometry: _Geometry, most: int) -> int:
    """Divides the output's columns evenly among tiles of ``most`` or some more."""
    q, granule = geometry.output[2], 16 * geometry.phases
    return -(-q // (-(-q // most) * granule)) * granule


def _clocks(problem: ConvProblem, settings: _Tiling, gpu: Gpu) -> int:
    """Estimates the busy clocks of a multiprocessor. A large tile copies fewer elements twice, but
    warps and blocks should have equal shares."""
    geometry = _Geometry(problem)
    tiles, blocks_y = _grid(geometry, settings)
    warps_m, warps_n = _warps(problem, settings)
    groups = settings.rows * settings.columns // (16 * geometry.phases)
    turns = -(-groups // (warps_m // geometry.phases * settings.m_tiles))
    # A quarter of the multiprocessor takes 4 clocks for 8 elements, 8 channels and 16 pixels.
    products = turns * settings.m_tiles * settings.n_tiles * geometry.registers * warps_m * warps_n
    image = geometry.tile_bytes(settings)
    channels = min(problem.weight_shape[0], warps_n * 8 * settings.n_tiles)
    output = problem.dtype.itemsize * settings.rows * settings.columns * channels
    # Much of the image comes from the L2 cache. Products begin when the first tile is here.
    moved = (image // 2 + output) // _BYTES_OF_A_CLOCK
    resident = max(1, gpu.multiprocessors * settings.blocks // blocks_y)
    a_tile = products + moved + _CLOCKS_OF_A_TILE
    return image // _BYTES_OF_A_CLOCK + -(-tiles // resident) * a_tile
