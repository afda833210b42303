"""How the kernels of grouped convolutions divide a layer among blocks and warps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.kernels.grouped_layer import Layer, Tile

_MOST_OFFERS = 5
_MOST_SLAB_CHANNELS = 128
_SHARED_KEPT = 1024
"""Bytes of shared memory that CUDA keeps for itself in each block."""
_L2_BYTES_A_CLOCK = 24
"""To and from a multiprocessor, about, while all read and write."""


@dataclass(frozen=True)
class Plan:
    tile: Tile
    slab: int
    """Merged groups of a block."""
    m_tiles: int
    n_tiles: int
    """Tiles of a warp's matrix product, of 16 rows and of 8 columns."""
    stages: int
    warps: int
    shared_bytes: int
    runs: int
    """Blocks that the tiles of a slab are divided among."""
    blocks: int
    """Those that share the work of a tile and a slab."""
    resident: int
    """Those that a multiprocessor holds at a time."""
    score: float
    """Clocks of the layer, estimated to rank plans."""

    @property
    def settings(self) -> str:
        tile = f"{self.tile.images}x{self.tile.rows}x{self.tile.columns}"
        return f"TILE={tile},SLAB={self.slab},M={self.m_tiles},STAGES={self.stages}"


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def n_tiles_of(chunks: int) -> int:
    """Returns how many of ``chunks`` 8-channel tiles a warp takes: at most 4, unless prime."""
    return chunks if chunks in (5, 7) else max(d for d in divisors(chunks) if d <= 4)


def slabs_of(layer: Layer) -> list[int]:
    """Returns how many merged groups a block may take."""
    width = 8 * max(layer.in_chunks, layer.out_chunks)
    return [d for d in divisors(layer.merged_groups) if d == 1 or d * width <= _MOST_SLAB_CHANNELS]


@dataclass(frozen=True)
class Work:
    """What a block does for a tile."""

    mma: float
    """Of 16 x 8 x 16, in its warps."""
    matrices: float
    """Of 8 x 8, which its warps load from shared memory."""
    copies: int
    """Of 16 bytes, to shared memory."""
    in_pixels: int
    """Those that lie in the images."""
    out_pixels: int
    out_loads: int
    """How often an output passes through shared memory."""
    once_bytes: float = 0.0
    """Moved once a block."""


def planned(
    layer: Layer,
    tile: Tile,
    slab: int,
    m_tiles: int,
    n_tiles: int,
    stages: int,
    warps: int,
    shared_bytes: int,
    work: Work,
    gpu: Gpu,
    blocks: int = 1,
) -> Plan | None:
    """Returns the plan with its blocks and its score, or None if no block fits."""
    registers = 64 + 6 * m_tiles * n_tiles  # as seen in cubins
    resident = min(
        (gpu.shared_bytes + _SHARED_KEPT) // (shared_bytes + _SHARED_KEPT),
        65536 // (32 * warps * registers),
        2048 // (32 * warps),
    )
    if resident == 0:
        return None
    tiles = math.prod(tile.counts(layer))
    slots = resident * gpu.multiprocessors
    abreast = layer.merged_groups // slab * blocks  # that do not share tiles
    rounds = -(-tiles * abreast // slots)
    if abreast <= slots:  # all blocks at once
        rounds = -(-tiles // (slots // abreast))
    runs = min(-(-tiles // rounds), 65535)

    # Clocks of a tile: tensor cores multiply 1024 pairs a clock, shared among warps in four parts;
    # shared memory moves 128 bytes; L2 sectors of 32 bytes.
    balance = -(-resident * warps // 4) * 4 / (resident * warps)
    in_bytes, out_bytes = (16 * slab * n for n in (layer.in_chunks, layer.out_chunks))
    shared_traffic = work.in_pixels * in_bytes + work.out_loads * work.out_pixels * out_bytes
    sectors = work.in_pixels * -(-in_bytes // 32) + work.out_pixels * -(-out_bytes // 32)
    clocks = max(
        2 * work.mma * balance,
        work.matrices + shared_traffic / 128,
        32 * sectors / _L2_BYTES_A_CLOCK,
    )
    # A warp alone takes 8 clocks for an mma, and some 30 for the instructions of a copy.
    alone = (8 * work.mma + 30 * work.copies / 32) / warps
    # Only other blocks fill the pauses of one that waits for its tile.
    pause = (1.0 if stages == 1 else 0.4) / resident
    once = resident * work.once_bytes / _L2_BYTES_A_CLOCK
    score = rounds * max(resident * clocks * (1 + pause), alone) + once
    return Plan(
        tile, slab, m_tiles, n_tiles, stages, warps, shared_bytes, runs, blocks, resident, score
    )


def best(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Returns the best, and others that differ in two of what no estimate decides: the slab, the
    tile, the stages."""
    chosen: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.score):
        if len(chosen) < _MOST_OFFERS and all(
            sum((plan.tile != p.tile, plan.slab != p.slab, plan.stages != p.stages)) > 1
            for p in chosen
        ):
            chosen.append(plan)
    return tuple(chosen)


def plan_named(plans: Iterable[Plan], settings: str) -> Plan:
    """Returns the plan of these settings.

    Raises:
        ValueError: there is none.
    """
    plans = tuple(plans)
    for plan in plans:
        if plan.settings == settings:
            return plan
    allowed = ", ".join(plan.settings for plan in plans) or "nothing: it is not offered"
    raise ValueError(f"settings must be one of {allowed}; got {settings!r}")
