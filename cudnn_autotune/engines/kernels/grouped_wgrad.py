"""The weight gradient of grouped 2-d convolutions of 4 to 64 channels a group, on tensor cores."""

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
from cudnn_autotune.engines.kernels.sum_parts import sum_launch, sums_bytes
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch, Recipe

_SOURCES = ("grouped_tile.cuh", "grouped_wgrad.cu")
_PLANNING = ("grouped_layer.py", "grouped_plan.py", "grouped_wgrad.py")
_MOST_SUMS = (12, 24)
"""Tiles of 16 x 8 of a warp, which take four registers each: for more warps, or fewer loads."""
_MOST_WARPS = 8


def _weights(layer: Layer) -> int:
    """Elements that are written."""
    taps = layer.y.kernel * layer.x.kernel
    return layer.merged_groups * layer.merge * layer.group_out * layer.group_in * taps


def _plan(
    layer: Layer, tile: Tile, slab: int, stages: int, most_sums: int, gpu: Gpu
) -> Plan | None:
    # Pairs of 8-channel chunks of the taps are the rows of the product. A warp takes m pairs.
    pairs = -(-layer.y.kernel * layer.x.kernel * layer.in_chunks // 2)
    n = n_tiles_of(layer.out_chunks)[0]
    parts = -(-pairs // (most_sums // n))
    m = -(-pairs // parts)
    n_parts = layer.out_chunks // n
    blocks = -(-parts * n_parts // _MOST_WARPS)
    warps = slab * -(-parts // blocks) * n_parts
    if warps > _MOST_WARPS:
        return None
    stage_bytes = tile.in_pixels(layer) * (slab * layer.in_chunks | 1) * 16
    stage_bytes += tile.pixels * (slab * layer.out_chunks | 1) * 16
    shared = 128 + stages * stage_bytes
    steps = -(-tile.pixels // 16) * warps
    work = Work(
        mma=steps * m * n,
        matrices=steps * (4 * m + 2 * n),
        instructions=steps * (m * n + 3 * m + 24) + 150 * warps,
        copies=slab * (tile.in_pixels(layer) * layer.in_chunks + tile.pixels * layer.out_chunks),
        in_pixels=tile.read_pixels(layer),
        out_pixels=tile.pixels,
        out_bytes=16 * slab * layer.out_chunks,
        out_loads=1,
        once_bytes=2 * 4 * slab * _weights(layer) / layer.merged_groups / blocks,
    )
    return planned(
        *(layer, tile, slab, {"M_TILES": m, "N_TILES": n}, stages, warps),
        *(64 + 6 * m * n, shared, work, gpu, blocks),
    )


@functools.lru_cache(maxsize=256)
def _plans(layer: Layer, gpu: Gpu) -> tuple[Plan, ...]:
    found = [
        _plan(layer, tile, slab, stages, most_sums, gpu)
        for tile in tiles_of(layer)
        for slab in slabs_of(layer)
        for stages in (1, 2)
        for most_sums in _MOST_SUMS
    ]
    return best(plan for plan in found if plan is not None)


class GroupedWgrad:
    """Weight gradient of grouped convolutions, by grouped_wgrad.cu and sum_parts.cu.

    A gradient is NaN or infinite only if a product that it consists of is, where padding is zero.
    """

    name = "grouped_wgrad"
    version = sources.version_of(
        "device.cuh", *_SOURCES, *_PLANNING, "sum_parts.cu", "sum_parts.py"
    )

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        plans = self._plans(problem, gpu)[1]
        return [
            Offer(plan.settings, sums_bytes(problem, plan.runs), ("TENSOR_CORE",)) for plan in plans
        ]

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        layer, plans = self._plans(problem, gpu)
        plan = plan_named(plans, settings)
        assert layer is not None
        element = sources.ELEMENTS[problem.dtype]
        defines = {
            "ELEMENT": element,
            **grouped_layer.defines(layer, plan.tile),
            "SLAB": plan.slab,
            **dict(plan.warp),
            "WARPS": plan.warps,
            "STAGES": plan.stages,
            "MIN_BLOCKS": plan.resident,
        }
        sums = Address("workspace")
        multiply = KernelLaunch(
            Kernel(sources.source(*_SOURCES), "grouped_wgrad", tuple(defines.items())),
            grid=(layer.merged_groups // plan.slab, plan.runs, plan.blocks),
            block=(32 * plan.warps, 1, 1),
            arguments=(
                *(Address("x"), Address("y"), sums),
                *grouped_layer.arguments(layer, plan.tile),
            ),
            shared_bytes=plan.shared_bytes,
        )
        add = sum_launch(problem, plan.runs)
        return Recipe((multiply, add), sums_bytes(problem, plan.runs))

    @staticmethod
    def _plans(problem: ConvProblem, gpu: Gpu) -> tuple[Layer | None, tuple[Plan, ...]]:
        layer = layer_of(problem) if problem.op == "wgrad" else None
        if layer is None or gpu.compute_capability < (8, 0):
            return layer, ()
        return layer, _plans(layer, gpu)
