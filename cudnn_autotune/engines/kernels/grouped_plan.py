"""The division of a grouped convolution among blocks and warps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.kernels.family import occupancy
from cudnn_autotune.engines.kernels.grouped_layer import Layer, Tile

_MOST_OFFERS = 4
_MOST_BLOCK_CHANNELS = 128
_L2_BYTES_A_CLOCK = 24
"""To and from a multiprocessor, about, while all read and write."""
_L2_REQUEST_CLOCKS = 2.4
_L2_SECTOR_CLOCKS = 1.65
"""L2 clocks per request of up to 128 bytes, and per 32 bytes read, from each of 132 multiprocessors
that are all busy, as measured on an H200."""
_MOST_ISSUED_A_CLOCK = 3.2
_WARPS_OF_HALF = 8
"""Instructions of a multiprocessor if it had very many warps, and the warps for half of that, as
measured on an H200."""
_COPY_INSTRUCTIONS = 8
"""Instructions of a warp for 32 copies."""


@dataclass(frozen=True)
class Plan:
    tile: Tile
    block_groups: int
    """Merged groups of a block."""
    warp: tuple[tuple[str, int], ...]
    """Macros that say what a warp computes at a time."""
    stages: int
    warps: int
    shared_bytes: int
    runs: int
    """Blocks that the tiles of the same groups are divided among."""
    blocks: int
    """Blocks that share the work of a tile and its groups."""
    resident: int
    """Blocks that a multiprocessor holds at a time."""
    score: float
    """Clocks of the layer, estimated to rank plans."""

    @property
    def settings(self) -> str:
        tile = f"{self.tile.images}x{self.tile.rows}x{self.tile.columns}"
        warp = ",".join(f"{name}={value}" for name, value in self.warp)
        return f"TILE={tile},BLOCK_GROUPS={self.block_groups},{warp},STAGES={self.stages}"


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def n_tiles_of(chunks: int) -> list[int]:
    """Returns how many of ``chunks`` 8-channel tiles a warp may take: at most 4, unless prime."""
    most = chunks if chunks in (5, 7) else max(d for d in divisors(chunks) if d <= 4)
    return [most, 2] if most == 4 else [most]


def block_groups_of(layer: Layer) -> list[int]:
    """Returns how many merged groups a block may take."""
    width = 8 * max(layer.in_chunks, layer.out_chunks)
    return [d for d in divisors(layer.merged_groups) if d == 1 or d * width <= _MOST_BLOCK_CHANNELS]


@dataclass(frozen=True)
class Work:
    """The work of a block for a tile."""

    mma: float
    """Matrix products of 16 x 8 x 16 (16 x 8 x 8 in TF32) in all warps."""
    matrices: float
    """Matrices of 128 bytes that all warps load from shared memory."""
    instructions: float
    """Instructions of all warps, except copies to shared memory."""
    copies: int
    """Copies of 16 bytes to shared memory."""
    in_pixels: int
    """Input pixels that lie inside the images."""
    out_pixels: int
    out_bytes: int
    """Bytes of an output pixel that are adjacent, or are copied together."""
    out_loads: int
    """Passes of an output through shared memory."""
    once_bytes: float = 0.0
    """Bytes moved once per block."""


def planned(
    layer: Layer,
    tile: Tile,
    block_groups: int,
    warp: dict[str, int],
    stages: int,
    warps: int,
    registers: int,
    shared_bytes: int,
    work: Work,
    gpu: Gpu,
    blocks: int = 1,
) -> Plan | None:
    """Returns the plan with its blocks and its score, or None if no block fits."""
    resident = occupancy(gpu, 32 * warps, registers, shared_bytes)
    if resident == 0:
        return None
    tiles = math.prod(tile.counts(layer))
    slots = resident * gpu.multiprocessors
    abreast = layer.merged_groups // block_groups * blocks  # blocks that do not share tiles
    rounds = -(-tiles * abreast // slots)
    if abreast <= slots:  # all blocks at once
        rounds = -(-tiles // (slots // abreast))
    runs = min(-(-tiles // rounds), 65535)

    # Clocks of a tile: tensor cores multiply 1024 pairs a clock (512 in TF32), shared among warps
    # in four parts; shared memory moves 128 bytes.
    balance = -(-resident * warps // 4) * 4 / (resident * warps)
    in_bytes = block_groups * layer.in_chunks * layer.chunk_bytes
    out_bytes = block_groups * layer.out_chunks * layer.chunk_bytes
    shared_traffic = work.in_pixels * in_bytes + work.out_loads * work.out_pixels * out_bytes
    resident_warps = resident * warps
    issued = _MOST_ISSUED_A_CLOCK * resident_warps / (resident_warps + _WARPS_OF_HALF)
    copying = _COPY_INSTRUCTIONS * work.copies / 32
    requests = work.in_pixels * _requests(in_bytes, 128)
    requests += work.out_pixels * out_bytes / work.out_bytes * _requests(work.out_bytes, 128)
    clocks = max(
        2 * work.mma * balance,
        work.matrices + shared_traffic / 128,
        (work.instructions + copying) / issued,
        requests * _L2_REQUEST_CLOCKS,
        work.in_pixels * _requests(in_bytes, 32) * _L2_SECTOR_CLOCKS,
    )
    # A warp alone takes 8 clocks for an mma, and some 30 for the instructions of a copy.
    alone = (8 * work.mma + 30 * work.copies / 32) / warps
    # Only other blocks fill the pauses of one that waits for its tile.
    pause = (1.0 if stages == 1 else 0.4) / resident
    once = resident * work.once_bytes / _L2_BYTES_A_CLOCK
    score = rounds * max(resident * clocks * (1 + pause), alone) + once
    return Plan(
        *(tile, block_groups, tuple(warp.items()), stages, warps, shared_bytes),
        *(runs, blocks, resident, score),
    )


@functools.lru_cache(maxsize=256)
def _requests(together: int, most: int) -> float:
    """Returns how many aligned chunks of ``most`` bytes are touched by ``together`` adjacent bytes,
    on average over neighbours."""
    ends = [together * i for i in range(9)]
    return sum(-(-end // most) - start // most for start, end in itertools.pairwise(ends)) / 8


def best(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """Returns the best, and others that differ in two of what no estimate decides: the groups, the
    tile, the stages."""
    chosen: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: plan.score):
        if len(chosen) < _MOST_OFFERS and all(
            sum((plan.tile != p.tile, plan.block_groups != p.block_groups, plan.stages != p.stages))
            > 1
            for p in chosen
        ):
            chosen.append(plan)
    return tuple(chosen)
