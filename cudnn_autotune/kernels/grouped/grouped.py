"""Grouped 2-d convolutions of 4 to 56 channels a group on tensor cores: fprop and dgrad."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.family import KernelFamily, addends, epilogue_macros, operands
from cudnn_autotune.kernels.grouped import grouped_layer
from cudnn_autotune.kernels.grouped.grouped_layer import (
    Layer,
    Tile,
    Tiling,
    Work,
    best,
    block_groups_of,
    divisors,
    layer_of,
    n_tiles_of,
    tiles_of,
    tiling_of,
)

_SOURCES = ("grouped_tile.cuh", "grouped_multiply.cuh", "grouped.cu")
_MOST_SUMS = 16
"""Most tiles of 16 x 8 of a warp, each with four registers."""
_MOST_ROWS = 8


@dataclass(frozen=True)
class _Item:
    """The simultaneous outputs of a warp: 16 pixels of ``rows`` rows, in ``groups`` groups, of
    ``n_tiles`` x 8 output channels."""

    rows: int
    groups: int
    n_tiles: int


def _items_of(layer: Layer, tile: Tile, block_groups: int) -> list[_Item]:
    return [
        _Item(rows, groups, n)
        for n in n_tiles_of(layer.out_chunks)
        for rows in divisors(tile.rows)
        for groups in (divisors(block_groups) if n == layer.out_chunks else [1])
        if rows <= _MOST_ROWS and rows * groups * n <= max(_MOST_SUMS, n)
    ]


def _column_work(layer: Layer, item: _Item, taps: int) -> tuple[float, float, float]:
    """Returns the mma, the matrices and the instructions of a column tap with ``taps`` row taps,
    in one group."""
    rows, n = item.rows, item.n_tiles
    read = (rows - 1) * layer.y.in_step + taps
    if layer.is_tf32:
        filter_loads = 2 if layer.y.is_dgrad else 1
        mma = layer.in_chunks * rows * n * taps
        matrices = layer.in_chunks * (4 * read + 2 * taps * n)
        loads = layer.in_chunks * (2 * read + filter_loads * taps * n)
        rounding = 2 * 4 * layer.in_chunks * read
        return mma, matrices, mma + loads + rounding
    pairs, single = divmod(layer.in_chunks, 2)
    matrices = pairs * (4 * read + 2 * taps * n)
    matrices += single * (4 * -(-read // 2) + 2 * max(1, taps - 1) * n)
    products = rows * n * (pairs * taps + single * (taps + 1) / 2)
    return rows * n * taps * layer.in_chunks / 2, matrices, products + matrices / 4


def _work_of(layer: Layer, item: _Item) -> tuple[float, float, float]:
    """Returns the mma, the matrices and the instructions of an item."""
    rows, stored = item.rows, item.rows * item.groups * item.n_tiles
    mma = matrices = instructions = 0.0
    for phase_y in range(layer.y.phases):
        column = _column_work(layer, item, layer.y.taps(phase_y))
        for phase_x in range(layer.x.phases):
            columns = layer.x.taps(phase_x) * item.groups
            mma += columns * column[0]
            matrices += columns * column[1]
            instructions += columns * column[2] + 9 * stored + rows * 10 + 100
            if layer.merge > 1:
                instructions += 4 * stored
    return mma, matrices, instructions


def _tiling(
    layer: Layer, tile: Tile, block_groups: int, stages: int, item: _Item, gpu: Gpu
) -> Tiling | None:
    n = item.n_tiles
    segments = tile.pixels // (8 * item.rows)
    items = -(-segments // 2) * (block_groups // item.groups) * (layer.out_chunks // n)
    warps = min(range(4, 13), key=lambda warps: (-(-items // warps) * warps, -warps))

    filter_rows, filter_chunks = layer.merge * layer.group_out, layer.in_chunks
    if layer.y.is_dgrad:
        filter_rows, filter_chunks = layer.merge * layer.group_in, layer.out_chunks
    step = 32 if layer.is_tf32 and not layer.y.is_dgrad else 16
    filter_bytes = layer.y.kernel * layer.x.kernel * filter_chunks * layer.chunk_bytes
    filters = block_groups * filter_rows * (filter_bytes // step | 1) * step
    tile_bytes = tile.in_pixels(layer) * (block_groups * layer.in_chunks | 1) * layer.chunk_bytes
    stored = item.groups * n  # tiles, of a pixel
    stored_rows = 2 if stored % 2 == 1 and item.rows > 1 and not layer.is_tf32 else 1
    scratch = warps * stored_rows * 16 * (stored | 1) * layer.chunk_bytes
    shared = filters + stages * tile_bytes + scratch

    mma, matrices, instructions = _work_of(layer, item)
    items = -(-items // warps) * warps
    work = Work(
        mma=items * mma,
        matrices=items * matrices,
        instructions=items * instructions + 200 * warps,
        copies=tile.in_pixels(layer) * block_groups * layer.in_chunks * layer.chunk_bytes // 16,
        in_pixels=tile.read_pixels(layer),
        out_pixels=tile.pixels * layer.y.phases * layer.x.phases,
        out_bytes=layer.chunk_bytes * stored,
        out_loads=2,
        once_bytes=filters,
    )
    registers = 56 + 4 * item.rows * stored + 2 * layer.y.kernel * n
    warp = {"ROWS": item.rows, "GROUPS": item.groups, "N_TILES": n}
    return tiling_of(layer, tile, block_groups, warp, stages, warps, registers, shared, work, gpu)


@functools.lru_cache(maxsize=256)
def _tilings(layer: Layer, gpu: Gpu) -> tuple[Tiling, ...]:
    found = [
        _tiling(layer, tile, block_groups, stages, item, gpu)
        for tile in tiles_of(layer)
        for block_groups in block_groups_of(layer)
        for item in _items_of(layer, tile, block_groups)
        for stages in (1, 2)
    ]
    return best(tiling for tiling in found if tiling is not None)


class Grouped(KernelFamily[Tiling]):
    """Forward and input gradient of grouped convolutions, by grouped.cu.

    An output is NaN or infinite only because of its own group's operands.
    """

    name = "grouped"
    version = sources.version_of(__name__)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Tiling]:
        layer = None if problem.op == "wgrad" else layer_of(problem)
        return () if layer is None else _tilings(layer, gpu)

    def build(self, problem: ConvProblem, tiling: Tiling, gpu: Gpu) -> Recipe:
        layer = layer_of(problem)
        assert layer is not None
        defines = {
            "ELEMENT": sources.ELEMENTS[problem.dtype],
            "DGRAD": int(layer.y.is_dgrad),
            **grouped_layer.defines(layer, tiling.tile),
            "BLOCK_GROUPS": tiling.block_groups,
            **dict(tiling.warp),
            "WARPS": tiling.warps,
            "STAGES": tiling.stages,
            "MIN_BLOCKS": tiling.resident,
            "SHARED_BYTES": tiling.shared_bytes,
            **dict(epilogue_macros(problem)),
        }
        launch = KernelLaunch(
            Kernel(sources.source(__package__, *_SOURCES), "grouped", tuple(defines.items())),
            grid=(layer.merged_groups // tiling.block_groups, tiling.runs, 1),
            block=(32 * tiling.warps, 1, 1),
            arguments=(
                *operands(problem),
                *addends(problem),
                *grouped_layer.arguments(layer, tiling.tile),
            ),
            shared_bytes=tiling.shared_bytes,
        )
        return Recipe((launch,))
