"""The weight gradient of grouped 2-d convolutions of 4 to 56 channels a group, on tensor cores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.family import KernelFamily
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
from cudnn_autotune.kernels.sum_parts import sum_launch, sums_bytes

_SOURCES = ("grouped_tile.cuh", "grouped_wgrad_operands.cuh", "grouped_wgrad.cu")
_MOST_SUMS = 20
"""Most tiles of 16 x 8 of a warp, each with four registers, unless one pair has more."""
_MOST_PRODUCTS = 256
"""Most mma in the unrolled loop over rows."""
_MOST_WARPS = 12


def _weights(layer: Layer) -> int:
    """Returns the number of written elements."""
    taps = layer.y.kernel * layer.x.kernel
    return layer.merged_groups * layer.merge * layer.group_out * layer.group_in * taps


def _pairs(layer: Layer) -> int:
    """Returns the pairs of 8-channel chunks of the column taps."""
    return -(-layer.x.kernel * layer.in_chunks // 2)


@dataclass(frozen=True)
class _Item:
    """A warp's part of the gradient: ``pairs`` of 8-channel chunks of column taps, for all row
    taps, and ``n_tiles`` x 8 output channels."""

    pairs: int
    n_tiles: int


def _items_of(layer: Layer) -> list[_Item]:
    return [
        _Item(pairs, n)
        for n in n_tiles_of(layer.out_chunks)
        for pairs in range(1, _pairs(layer) + 1)
        if pairs == 1 or layer.y.kernel * pairs * n <= _MOST_SUMS
    ]


def _rows_of(tile: Tile, products: int) -> int:
    """Returns the number of unrolled rows of the tile in a warp, with ``products`` mma a row."""
    return max(d for d in divisors(tile.rows) if d == 1 or d * products <= _MOST_PRODUCTS)


def _tiling(
    layer: Layer, tile: Tile, block_groups: int, stages: int, item: _Item, gpu: Gpu
) -> Tiling | None:
    taps, pairs, n = layer.y.kernel, item.pairs, item.n_tiles
    parts = -(-_pairs(layer) // pairs)
    n_parts = layer.out_chunks // n
    blocks = -(-block_groups * parts * n_parts // _MOST_WARPS)
    warps = block_groups * -(-parts // blocks) * n_parts
    if warps > _MOST_WARPS:
        return None
    stage_chunks = tile.in_pixels(layer) * (block_groups * layer.in_chunks | 1)
    stage_chunks += tile.pixels * (block_groups * layer.out_chunks | 1)
    shared = 256 + stages * stage_chunks * layer.chunk_bytes

    products = taps * pairs * n
    rows = _rows_of(tile, products)
    in_rows = (rows - 1) * layer.y.stride + taps
    segments = 1 if layer.is_tf32 else 2  # per mma
    steps = -(-tile.images * tile.columns // (8 * segments)) * (tile.rows // rows) * warps
    loads = 2 * pairs * in_rows + (n + 1) // 2 * rows
    if layer.is_tf32:  # each register by itself, two to round it, and one where columns may end
        ends = layer.x.out_size % tile.columns > 0
        loads = 4 * (3 + ends) * pairs * in_rows + 2 * 3 * n * rows
    copied = tile.in_pixels(layer) * layer.in_chunks + tile.pixels * layer.out_chunks
    work = Work(
        mma=steps * rows * products,
        matrices=steps * (4 * pairs * in_rows + 2 * n * rows),
        instructions=steps * (rows * products + loads + 60) + 200 * warps,
        copies=block_groups * copied * layer.chunk_bytes // 16,
        in_pixels=tile.read_pixels(layer),
        out_pixels=tile.pixels,
        out_bytes=layer.chunk_bytes * block_groups * layer.out_chunks,
        out_loads=1,
        once_bytes=2 * 4 * block_groups * _weights(layer) / layer.merged_groups / blocks,
    )
    registers = 48 + 4 * products + 2 * n * min(rows, taps) + 6 * pairs
    if layer.is_tf32:
        registers += 8
    return tiling_of(
        *(layer, tile, block_groups, {"PAIRS": pairs, "N_TILES": n}, stages, warps),
        *(registers, shared, work, gpu, blocks),
    )


@functools.lru_cache(maxsize=256)
def _tilings(layer: Layer, gpu: Gpu) -> tuple[Tiling, ...]:
    items = _items_of(layer)
    found = [
        _tiling(layer, tile, block_groups, stages, item, gpu)
        for tile in tiles_of(layer)
        for block_groups in block_groups_of(layer)
        for stages in (1, 2)
        for item in items
    ]
    return best(tiling for tiling in found if tiling is not None)


class GroupedWgrad(KernelFamily[Tiling]):
    """Weight gradient of grouped convolutions, by grouped_wgrad.cu and sum_parts.cu.

    A gradient is NaN or infinite only if one of its products is, with zeros as padding.
    """

    name = "grouped_wgrad"
    version = sources.version_of(__name__)

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Tiling]:
        layer = layer_of(problem) if problem.op == "wgrad" else None
        return () if layer is None else _tilings(layer, gpu)

    def workspace_bytes(self, problem: ConvProblem, tiling: Tiling, gpu: Gpu) -> int:
        return sums_bytes(problem, tiling.runs)

    def build(self, problem: ConvProblem, tiling: Tiling, gpu: Gpu) -> Recipe:
        layer = layer_of(problem)
        assert layer is not None
        element = sources.ELEMENTS[problem.dtype]
        warp = dict(tiling.warp)
        defines = {
            "ELEMENT": element,
            **grouped_layer.defines(layer, tiling.tile),
            "BLOCK_GROUPS": tiling.block_groups,
            **warp,
            "ROWS": _rows_of(tiling.tile, layer.y.kernel * warp["PAIRS"] * warp["N_TILES"]),
            "ROWS_FIT": int(layer.y.out_size % tiling.tile.rows == 0),
            "COLUMNS_FIT": int(layer.x.out_size % tiling.tile.columns == 0),
            "WARPS": tiling.warps,
            "STAGES": tiling.stages,
            "MIN_BLOCKS": tiling.resident,
            "SHARED_BYTES": tiling.shared_bytes,
        }
        sums = Address("workspace")
        multiply = KernelLaunch(
            Kernel(sources.source(__package__, *_SOURCES), "grouped_wgrad", tuple(defines.items())),
            grid=(layer.merged_groups // tiling.block_groups, tiling.runs, tiling.blocks),
            block=(32 * tiling.warps, 1, 1),
            arguments=(
                *(Address("x"), Address("y"), sums),
                *grouped_layer.arguments(layer, tiling.tile),
            ),
            shared_bytes=tiling.shared_bytes,
        )
        add = sum_launch(problem, tiling.runs)
        return Recipe((multiply, add), sums_bytes(problem, tiling.runs))
