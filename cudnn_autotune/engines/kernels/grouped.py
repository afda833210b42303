"""Grouped 2-d convolutions of 4 to 64 channels a group on tensor cores: fprop and dgrad."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.kernels import grouped_layer, sources
from cudnn_autotune.engines.kernels.grouped_layer import Layer, Tile, layer_of, tiles_of
from cudnn_autotune.engines.kernels.grouped_plan import (
    Plan,
    Work,
    best,
    n_tiles_of,
    plan_named,
    planned,
    slabs_of,
)
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Int64, Kernel, KernelLaunch, Recipe

_FILES = ("device.cuh", "grouped_tile.cuh", "grouped.cu")
_PLANNING = ("grouped_layer.py", "grouped_plan.py", "grouped.py")
_NONE = Int64(0)
"""A null pointer."""
_MOST_SUMS = 16
"""Tiles of 16 x 8 of a warp, which take four registers each."""


def _plan(layer: Layer, tile: Tile, slab: int, stages: int, gpu: Gpu) -> Plan | None:
    # A warp's item: 16 m pixels, 8 n channels. Its steps load 4 m + 2 n matrices for m n mma.
    m_tiles_in_tile = -(-tile.pixels // 16)
    n = n_tiles_of(layer.out_chunks)
    m = min(
        (m for m in (4, 3, 2, 1) if m * n <= _MOST_SUMS),
        key=lambda m: -(-m_tiles_in_tile // m) * max(4 * m + 2 * n, 2 * m * n),
    )
    items = -(-m_tiles_in_tile // m) * slab * (layer.out_chunks // n)
    warps = min(range(4, 13), key=lambda warps: (-(-items // warps) * warps, -warps))

    filter_rows, filter_chunks = layer.merge * layer.group_out, layer.in_chunks
    if layer.y.is_dgrad:
        filter_rows, filter_chunks = layer.merge * layer.group_in, layer.out_chunks
    filters = slab * filter_rows * (layer.y.kernel * layer.x.kernel * filter_chunks | 1) * 16
    tile_bytes = tile.in_pixels(layer) * (slab * layer.in_chunks | 1) * 16
    stored_tiles = 2 if n % 2 == 1 and m > 1 else 1
    shared = filters + stages * tile_bytes + warps * stored_tiles * 16 * (n | 1) * 16

    phases = [
        layer.y.taps(a) * layer.x.taps(b)
        for a in range(layer.y.phases)
        for b in range(layer.x.phases)
    ]
    steps = sum(-(-taps * layer.in_chunks // 2) for taps in phases)
    steps *= -(-items // warps) * warps
    work = Work(
        mma=steps * m * n,
        matrices=steps * (4 * m + 2 * n),
        copies=tile.in_pixels(layer) * slab * layer.in_chunks,
        in_pixels=tile.read_pixels(layer),
        out_pixels=tile.pixels * len(phases),
        out_loads=2,
        once_bytes=filters,
    )
    return planned(layer, tile, slab, m, n, stages, warps, shared, work, gpu)


@functools.lru_cache(maxsize=256)
def _plans(layer: Layer, gpu: Gpu) -> tuple[Plan, ...]:
    found = [
        _plan(layer, tile, slab, stages, gpu)
        for tile in tiles_of(layer)
        for slab in slabs_of(layer)
        for stages in (1, 2)
    ]
    return best(plan for plan in found if plan is not None)


class Grouped:
    """Forward and input gradient of grouped convolutions, by grouped.cu.

    An output is NaN or infinite only if its own group's operands make it so.
    """

    name = "grouped"
    version = sources.version(*(sources.text(file) for file in (*_FILES, *_PLANNING)))

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        plans = self._plans(problem, gpu)[1]
        return [Offer(plan.settings, numerical_notes=("TENSOR_CORE",)) for plan in plans]

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        layer, plans = self._plans(problem, gpu)
        plan = plan_named(plans, settings)
        assert layer is not None
        defines = {
            "ELEMENT": sources.ELEMENTS[problem.dtype],
            "DGRAD": int(layer.y.is_dgrad),
            **grouped_layer.defines(layer, plan.tile),
            "SLAB": plan.slab,
            "M_TILES": plan.m_tiles,
            "N_TILES": plan.n_tiles,
            "WARPS": plan.warps,
            "STAGES": plan.stages,
            "MIN_BLOCKS": plan.resident,
            "HAS_BIAS": int(problem.bias),
            "HAS_RESIDUAL": int(problem.residual),
            "ACTIVATION": sources.ACTIVATION_NUMBERS[problem.activation],
        }
        x, y = Address("x"), Address("y")
        launch = KernelLaunch(
            Kernel("".join(map(sources.text, _FILES)), "grouped", tuple(defines.items())),
            grid=(layer.merged_groups // plan.slab, plan.runs, 1),
            block=(32 * plan.warps, 1, 1),
            arguments=(
                y if layer.y.is_dgrad else x,
                Address("w"),
                x if layer.y.is_dgrad else y,
                Address("bias") if problem.bias else _NONE,
                Address("residual") if problem.residual else _NONE,
                *grouped_layer.arguments(layer, plan.tile),
            ),
            shared_bytes=plan.shared_bytes,
        )
        return Recipe((launch,))

    @staticmethod
    def _plans(problem: ConvProblem, gpu: Gpu) -> tuple[Layer | None, tuple[Plan, ...]]:
        layer = None if problem.op == "wgrad" else layer_of(problem)
        if layer is None or gpu.compute_capability < (8, 0):
            return layer, ()
        return layer, _plans(layer, gpu)
