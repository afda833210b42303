"""Gradients of the weight for images with few channels, on tensor cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels.family import KernelFamily
from cudnn_autotune.kernels.few_channels.few_channels_rows import Rows, is_computed, with_images
from cudnn_autotune.kernels.few_channels.few_channels_wgrad_narrow import (
    NarrowTiling,
    build_narrow,
    narrow_tilings,
    narrow_workspace_bytes,
    worthwhile_blocks,
)
from cudnn_autotune.kernels.sources import source, version_of
from cudnn_autotune.kernels.sum_parts import sum_launch, sums_bytes

_ROWS = ("few_channels_rows.cuh", "few_channels_wgrad_sums.cuh")
_OF_HALVES, _OF_TF32 = "few_channels_wgrad.cu", "few_channels_wgrad_tf32.cu"
_WARPS = 8
_MOST_COLUMNS = 128
_MOST_OFFERS = 5
_MOST_SUMS = 160
"""Registers of a thread for sums: with 8 warps a block, it has at most 255 registers."""
_SUMS_OF_TWO_BLOCKS, _SUMS_OF_THREE_BLOCKS = 80, 32
_MOST_ELEMENTS = 432
"""Elements of a window. A larger one is a matrix for cuDNN."""


@dataclass(frozen=True)
class _Tiling:
    columns: int
    """Columns of output pixels in a block's tile."""
    m_tiles: int
    """Sixteens of output channels of a block."""
    warps_n: int
    """Warps of a block that share the window's elements."""
    blocks: int
    """Intended resident blocks of a multiprocessor."""

    @property
    def settings(self) -> str:
        return (
            f"COLUMNS={self.columns},CHANNELS={16 * self.m_tiles},WARPS={self.warps_n},"
            f"BLOCKS={self.blocks}"
        )


class FewChannelsWgrad(KernelFamily[_Tiling | NarrowTiling]):
    """Implicit GEMM for first layers: float16, bfloat16 and TF32, both layouts, 1-d to 3-d, 1 to
    16 input channels, no dilation, no groups. Contiguous layers of up to 8 filters may have more
    channels. Sums of blocks are added in a fixed order."""

    name = "few_channels_wgrad"
    version = version_of(__name__)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling | NarrowTiling]:
        problem = with_images(problem)
        if problem.op != "wgrad" or not is_computed(problem, Rows(problem).is_planar):
            return ()
        narrow = narrow_tilings(problem, gpu)
        elements = math.prod(problem.weight_shape[1:])
        if elements > _MOST_ELEMENTS:
            return narrow
        q = -(-problem.output_shape[-1] // _segments(problem))
        columns = -(-q // (-(-q // _MOST_COLUMNS) * 8)) * 8
        found = []
        for m_tiles in range(1, 5):
            blocks_y = -(-problem.weight_shape[0] // (16 * m_tiles))
            if m_tiles > 1 and problem.weight_shape[0] <= 16 * (m_tiles - 1) * blocks_y:
                continue  # fewer would do
            for warps_n in (1, 2, 4, 8):
                n_tiles = _n_tiles(problem, warps_n)
                sums = 4 * m_tiles * n_tiles
                if sums <= _MOST_SUMS and 8 * n_tiles * (warps_n - 1) < elements:  # no warp idles
                    found.append((m_tiles, n_tiles, warps_n))
        found.sort(key=lambda s: _cost(problem, *s))
        settings = []
        for m_tiles, n_tiles, warps_n in found[: _MOST_OFFERS - 1]:
            sums = 4 * m_tiles * n_tiles
            blocks = 1 + (sums <= _SUMS_OF_TWO_BLOCKS) + (sums <= _SUMS_OF_THREE_BLOCKS)
            settings.append(_fitted(_Tiling(columns, m_tiles, warps_n, blocks), problem, gpu))
        if settings and columns > 32:
            turn = 8 * _WARPS // settings[0].warps_n  # all groups of warps have equal shares
            half = -(-columns // (2 * turn)) * turn
            settings.append(_fitted(replace(settings[0], columns=half), problem, gpu))
        return (*narrow, *dict.fromkeys(s for s in settings if s.blocks > 0))

    def workspace_bytes(
        self, problem: ConvProblem, tiling: _Tiling | NarrowTiling, gpu: Gpu
    ) -> int:
        if isinstance(tiling, NarrowTiling):
            return narrow_workspace_bytes(with_images(problem), tiling, gpu)
        return _workspace_bytes(with_images(problem), tiling, gpu)

    def build(self, problem: ConvProblem, tiling: _Tiling | NarrowTiling, gpu: Gpu) -> Recipe:
        problem = with_images(problem)
        if isinstance(tiling, NarrowTiling):
            return build_narrow(problem, tiling, gpu)
        rows = Rows(problem)
        q = problem.output_shape[-1]
        blocks_x, blocks_y = _grid(problem, tiling, gpu)
        defines: dict[str, str | int] = {
            **rows.defines,
            "TILE_P": _tile_rows(problem),
            "TILE_Q": tiling.columns,
            "PITCH": rows.pitch(tiling.columns, rows.row),
            "M_TILES": tiling.m_tiles,
            "N_TILES": _n_tiles(problem, tiling.warps_n),
            "WARPS_N": tiling.warps_n,
            "WARPS_K": _WARPS // tiling.warps_n,
            "BLOCKS": tiling.blocks,
            "SHARED_BYTES": _shared_bytes(problem, tiling),
            "IS_RAGGED": int(q % 8 != 0),
            "IS_PLANAR": int(rows.is_planar),
            "GRADIENT_COPY": math.gcd(
                q if rows.is_planar else problem.weight_shape[0], 16 // problem.dtype.itemsize
            ),
        }
        if not problem.may_use_tf32:
            segments = _segments(problem)
            defines["IS_SIGNAL"] = segments - 1
            defines["IS_SHIFTED"] = int(q % 8 != 0)
            defines["HAS_ODD_ROWS"] = q % 2
            if segments > 1:
                defines["IS_RAGGED"] = int(q % (segments * tiling.columns) != 0)
        add = KernelLaunch(
            Kernel(
                source(__package__, *_ROWS, _OF_TF32 if problem.may_use_tf32 else _OF_HALVES),
                "few_channels_wgrad",
                tuple(defines.items()),
            ),
            grid=(blocks_x, blocks_y, 1),
            block=(32 * _WARPS, 1, 1),
            arguments=(
                Address("x"),
                Address("y"),
                Address("workspace"),
                *rows.arguments(_tile_rows(problem), _segments(problem) * tiling.columns),
            ),
            shared_bytes=_shared_bytes(problem, tiling),
        )
        sums = sum_launch(problem, blocks_x)
        return Recipe((add, sums), _workspace_bytes(problem, tiling, gpu))


def _n_tiles(problem: ConvProblem, warps_n: int) -> int:
    """Returns the eights of the window's elements of a warp."""
    return -(-math.prod(problem.weight_shape[1:]) // (8 * warps_n))


def _tile_rows(problem: ConvProblem) -> int:
    """Returns the output's rows in a tile. Of half types an mma takes pixels of two rows."""
    return 1 if problem.may_use_tf32 or _segments(problem) > 1 else 2


def _segments(problem: ConvProblem) -> int:
    """Returns the segments of an output's row in a tile: two without a second row to pair."""
    rows = Rows(problem)
    is_signal = rows.output[:2] == rows.kernel[:2] == (1, 1) and not any(rows.padding[:2])
    return 2 if is_signal and not problem.may_use_tf32 else 1


def _tiles(problem: ConvProblem, settings: _Tiling) -> int:
    *_, tiles = Rows(problem).grid(_tile_rows(problem), _segments(problem) * settings.columns)
    return tiles


def _grid(problem: ConvProblem, settings: _Tiling, gpu: Gpu) -> tuple[int, int]:
    """Returns the blocks that share the tiles, and blocks along the output's channels."""
    blocks_y = -(-problem.weight_shape[0] // (16 * settings.m_tiles))
    resident = gpu.multiprocessors * settings.blocks // blocks_y
    return min(_tiles(problem, settings), max(1, resident), worthwhile_blocks(problem)), blocks_y


def _workspace_bytes(problem: ConvProblem, settings: _Tiling, gpu: Gpu) -> int:
    return sums_bytes(problem, _grid(problem, settings, gpu)[0])


def _shared_bytes(problem: ConvProblem, settings: _Tiling) -> int:
    rows = Rows(problem)
    # Elements of a row of each plane.
    elements = rows.planes * rows.pitch(settings.columns, rows.row)
    kernel_h = rows.kernel[1]
    n_tiles = _n_tiles(problem, settings.warps_n)
    sums = 16 * settings.m_tiles * settings.warps_n * n_tiles * 8 * 4
    channels = 16 * settings.m_tiles
    if problem.may_use_tf32:
        gradients = settings.columns * (channels + 8) * 4
        if rows.is_planar:
            gradients = channels * (settings.columns + 4) * 4
        return max(2 * (gradients + kernel_h * elements * 4), sums)
    gradients = 2 * settings.columns * (2 * channels + 16)
    if rows.is_planar:
        shifts = 16 if problem.output_shape[-1] % 8 else 0
        gradients = channels * (4 * settings.columns + 2 * shifts + 16)
    second_row = 1 if _segments(problem) > 1 else rows.stride[1]
    image = (kernel_h + second_row) * elements * 2
    return max(2 * (gradients + image) + kernel_h * elements * 4, sums)


def _cost(problem: ConvProblem, m_tiles: int, n_tiles: int, warps_n: int) -> float:
    """Returns the accesses to shared memory for 16 pixels, which bind before the tensor cores. A
    block alone on a multiprocessor waits more."""
    blocks_y = -(-problem.weight_shape[0] // (16 * m_tiles))
    waits = 1.5 if 4 * m_tiles * n_tiles > _SUMS_OF_TWO_BLOCKS else 1.0
    return waits * blocks_y * warps_n * (4 * m_tiles + 2 * n_tiles)


def _fitted(settings: _Tiling, problem: ConvProblem, gpu: Gpu) -> _Tiling:
    """Returns settings with narrower tiles, whose shared memory fits and which give each
    multiprocessor one."""
    while True:
        of_a_block = _shared_bytes(problem, settings) + gpu.reserved_shared_bytes
        fitting = gpu.sm_shared_bytes // of_a_block
        blocks_y = _grid(problem, settings, gpu)[1]
        is_enough = _tiles(problem, settings) * blocks_y >= gpu.multiprocessors
        if (fitting >= settings.blocks and is_enough) or settings.columns <= 32:
            return replace(settings, blocks=min(settings.blocks, fitting))
        half = -(-settings.columns // 16) * 8
        narrower = max(half, settings.columns - 16) if is_enough else half
        settings = replace(settings, columns=narrower)
