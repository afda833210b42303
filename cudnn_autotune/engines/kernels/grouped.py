"""Grouped 2-d convolutions of 4 to 64 channels a group on tensor cores: fprop and dgrad."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.kernels import sources
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Int64, Kernel, KernelLaunch, Recipe

_NONE = Int64(0)
"""A null pointer."""
_MOST_OFFERS = 5
_SHARED_KEPT = 1024
"""Bytes of shared memory that CUDA keeps for itself in each block."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a tile, as ``Axis`` of grouped.cu has it."""

    kernel: int
    stride: int
    pad: int
    is_dgrad: bool
    in_size: int
    out_size: int

    @property
    def phases(self) -> int:
        return self.stride if self.is_dgrad else 1

    @property
    def in_step(self) -> int:
        return 1 if self.is_dgrad else self.stride

    @property
    def units(self) -> int:
        """Output elements of one phase."""
        return -(-self.out_size // self.phases)

    def taps(self, phase: int) -> int:
        first = (phase + self.pad) % self.phases
        return -(-max(0, self.kernel - first) // self.phases)

    def extent(self, tile: int) -> int:
        """Input elements that ``tile`` units read."""
        if not self.is_dgrad:
            return (tile - 1) * self.stride + self.kernel
        ends = [
            ((phase + self.pad) // self.stride, self.taps(phase))
            for phase in range(self.phases)
            if self.taps(phase)
        ]
        return tile + max(end for end, _ in ends) - min(end - n + 1 for end, n in ends)


@dataclass(frozen=True)
class Layer:
    """A problem in the words of the kernel: "in" is what it reads, "out" what it writes."""

    images: int
    y: Axis
    x: Axis
    group_in: int
    group_out: int
    merge: int
    """Groups that are computed as one, whose width is a multiple of 8."""
    slabs: int
    """Merged groups."""

    @property
    def in_chunks(self) -> int:
        return self.merge * self.group_in // 8

    @property
    def out_chunks(self) -> int:
        return self.merge * self.group_out // 8


def layer_of(problem: ConvProblem) -> Layer | None:
    """Returns the problem in the kernels' words, or None if they do not compute it."""
    c, k = problem.weight_shape[1], problem.weight_shape[0] // problem.groups
    merge = 1 if c % 8 == k % 8 == 0 else 2
    if not (
        problem.spatial_dims == 2
        and problem.memory_format == torch.channels_last
        and problem.dtype in (torch.float16, torch.bfloat16)
        and problem.groups % merge == 0
        and problem.groups > 1
        and all(width % 4 == 0 and 4 <= width <= 64 for width in (c, k))
        and all(size <= 7 for size in problem.weight_shape[2:])
        and all(stride <= 2 for stride in problem.stride)
        and problem.dilation == (1, 1)
        and min(problem.alignment) >= 16
    ):
        return None
    is_dgrad = problem.op == "dgrad"
    x, y = problem.input_shape, problem.output_shape
    if is_dgrad:
        x, y, c, k = y, x, k, c
    vertical, horizontal = (
        Axis(
            problem.weight_shape[2 + d],
            problem.stride[d],
            problem.padding[d],
            is_dgrad,
            x[2 + d],
            y[2 + d],
        )
        for d in range(2)
    )
    return Layer(x[0], vertical, horizontal, c, k, merge, problem.groups // merge)


@dataclass(frozen=True)
class Plan:
    """How a layer is divided among blocks and warps; the macros of grouped.cu have these names."""

    tile: tuple[int, int, int]
    """Images, rows and columns of output units."""
    slab: int
    m_tiles: int
    n_tiles: int
    stages: int
    warps: int
    shared_bytes: int
    runs: int
    """Blocks that divide the tiles of a slab."""
    score: float
    """About the clocks that a multiprocessor needs for the layer."""

    @property
    def settings(self) -> str:
        tile = "x".join(map(str, self.tile))
        return f"TILE={tile},SLAB={self.slab},M={self.m_tiles},STAGES={self.stages}"


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def n_tiles_of(chunks: int) -> int:
    """Returns how many of ``chunks`` 8-channel tiles a warp takes: at most 4, unless prime."""
    return max(d for d in divisors(chunks) if d <= 4) if chunks not in (5, 7) else chunks


def tiles_of(layer: Layer, extents: Iterable[int]) -> list[tuple[int, int, int]]:
    """Returns tiles (images, rows, columns) of a plane of ``extents`` whose width is a multiple of
    8, as the banks of shared memory want it."""
    height, width = extents
    whole = -(-width // 8) * 8
    tiles = []
    for x in sorted({8, 16, whole}):
        for y in sorted({4, 8, 16, height}):
            if y > max(4, height) or x > whole or x * y > 512:
                continue
            is_whole = y >= height and x >= width
            tiles += [
                (images, y, x)
                for images in ((1, 2, 4, 8) if is_whole else (1,))
                if images == 1 or (images <= layer.images and images * x * y <= 256)
            ]
    return tiles


def _plan(
    layer: Layer, tile: tuple[int, int, int], slab: int, stages: int, gpu: Gpu
) -> Plan | None:
    images, rows, columns = tile
    m_tiles_in_tile = -(-math.prod(tile) // 16)
    n = n_tiles_of(layer.out_chunks)
    # Whichever more of a step's work: that of tensor cores, or matrices from shared memory.
    m = min(
        (m for m in (4, 3, 2, 1) if m * n <= 16),
        key=lambda m: -(-m_tiles_in_tile // m) * max(4 * m + 2 * n, 2 * m * n),
    )
    items = -(-m_tiles_in_tile // m) * slab * (layer.out_chunks // n)
    warps = min(range(4, 13), key=lambda w: (-(-items // w) * w, -w))

    filter_rows, filter_columns = layer.group_out, layer.in_chunks
    if layer.y.is_dgrad:
        filter_rows, filter_columns = layer.group_in, layer.out_chunks
    taps = layer.y.kernel * layer.x.kernel
    filters = slab * layer.merge * filter_rows * (taps * filter_columns | 1) * 16
    plane = -(-layer.x.extent(columns) // layer.x.in_step) * layer.x.in_step
    pixels = images * layer.y.extent(rows) * plane
    tile_bytes = pixels * (slab * layer.in_chunks | 1) * 16
    scratch = warps * 16 * (n | 1) * 16
    shared = filters + stages * tile_bytes + scratch
    if shared > gpu.shared_bytes:
        return None

    registers = 64 + 6 * m * n  # as seen in cubins
    resident = min(
        (gpu.shared_bytes + _SHARED_KEPT) // (shared + _SHARED_KEPT),
        65536 // (32 * warps * registers),
        2048 // (32 * warps),
    )
    if resident == 0:
        return None
    tiles = -(-layer.images // images) * -(-layer.y.units // rows) * -(-layer.x.units // columns)
    columns_of_blocks = layer.slabs // slab
    rounds = -(-tiles * columns_of_blocks // (resident * gpu.multiprocessors))
    runs = min(-(-tiles // rounds), 65535)

    # Clocks of a tile: of tensor cores at 1024 products a clock, shared among warps in four parts;
    # of shared memory at 128 bytes; of the way from L2 at some 24 bytes, in sectors of 32.
    phases = [
        layer.y.taps(a) * layer.x.taps(b)
        for a in range(layer.y.phases)
        for b in range(layer.x.phases)
    ]
    work = -(-items // warps) * warps * sum(-(-taps * layer.in_chunks // 2) for taps in phases)
    copied = min(pixels, images * layer.y.in_size * layer.x.in_size)
    outputs = math.prod(tile) * len(phases)
    in_bytes, out_bytes = (slab * n * 16 for n in (layer.in_chunks, layer.out_chunks))
    mma = work * m * n * 2 * (-(-resident * warps // 4) * 4 / (resident * warps))
    matrices = work * (4 * m + 2 * n) + (copied * in_bytes + 2 * outputs * out_bytes) / 128
    memory = (copied * -(-in_bytes // 32) + outputs * -(-out_bytes // 32)) * 32 / 24
    # Only other blocks fill the pauses of one that waits for its tile.
    pause = (1.0 if stages == 1 else 0.4) / resident
    score = rounds * resident * max(mma, matrices, memory) * (1 + pause) + filters / 24 * resident
    return Plan(tile, slab, m, n, stages, warps, shared, runs, score)


@functools.lru_cache(maxsize=256)
def plans_of(layer: Layer, gpu: Gpu) -> tuple[Plan, ...]:
    """Returns plans that differ in what no estimate decides: the slab, the tile, the stages."""
    slabs = [
        d
        for d in divisors(layer.slabs)
        if d == 1 or d * max(layer.in_chunks, layer.out_chunks) <= 16
    ]
    found = [
        plan
        for tile in tiles_of(layer, (layer.y.units, layer.x.units))
        for slab in slabs
        for stages in (1, 2)
        if (plan := _plan(layer, tile, slab, stages, gpu)) is not None
    ]
    found.sort(key=lambda plan: plan.score)
    chosen: list[Plan] = []
    for plan in found:
        if (
            all(
                sum((plan.tile != p.tile, plan.slab != p.slab, plan.stages != p.stages)) > 1
                for p in chosen
            )
            and len(chosen) < _MOST_OFFERS
        ):
            chosen.append(plan)
    return tuple(chosen)


class Grouped:
    """Forward and input gradient of grouped convolutions, by grouped.cu.

    An output is NaN or infinite only if its own group's operands make it so.
    """

    name = "grouped"
    version = sources.version(
        sources.source("grouped.cu"), Path(__file__).read_text(encoding="utf-8")
    )

    def offers(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Offer]:
        layer = layer_of(problem)
        if layer is None or problem.op == "wgrad" or gpu.compute_capability < (8, 0):
            return ()
        return tuple(
            Offer(plan.settings, numerical_notes=("TENSOR_CORE",)) for plan in plans_of(layer, gpu)
        )

    def recipe(self, problem: ConvProblem, settings: str, gpu: Gpu) -> Recipe:
        layer = layer_of(problem)
        plans = plans_of(layer, gpu) if layer is not None and problem.op != "wgrad" else ()
        plan = next((plan for plan in plans if plan.settings == settings), None)
        if layer is None or plan is None:
            raise ValueError(
                f"settings must be one of {[p.settings for p in plans]} for {problem.text}, "
                f"got {settings!r}"
            )
        images, rows, columns = plan.tile
        defines: dict[str, str | int] = {
            "ELEMENT": sources.ELEMENTS[problem.dtype],
            "DGRAD": int(problem.op == "dgrad"),
            "GROUP_IN": layer.group_in,
            "GROUP_OUT": layer.group_out,
            "MERGE": layer.merge,
            "SLAB": plan.slab,
            "KERNEL_Y": layer.y.kernel,
            "KERNEL_X": layer.x.kernel,
            "STRIDE_Y": layer.y.stride,
            "STRIDE_X": layer.x.stride,
            "PAD_Y": layer.y.pad,
            "PAD_X": layer.x.pad,
            "TILE_IMAGES": images,
            "TILE_Y": rows,
            "TILE_X": columns,
            "M_TILES": plan.m_tiles,
            "N_TILES": plan.n_tiles,
            "WARPS": plan.warps,
            "STAGES": plan.stages,
            "HAS_BIAS": int(problem.bias),
            "HAS_RESIDUAL": int(problem.residual),
            "ACTIVATION": sources.ACTIVATION_NUMBERS[problem.activation],
        }
        tiles_y, tiles_x = -(-layer.y.units // rows), -(-layer.x.units // columns)
        read, write = (Address("x"), Address("y"))
        if problem.op == "dgrad":
            read, write = write, read
        launch = KernelLaunch(
            Kernel(sources.source("grouped.cu"), "grouped", tuple(defines.items())),
            grid=(layer.slabs // plan.slab, plan.runs, 1),
            block=(32 * plan.warps, 1, 1),
            arguments=(
                read,
                Address("w"),
                write,
                Address("bias") if problem.bias else _NONE,
                Address("residual") if problem.residual else _NONE,
                layer.images,
                layer.y.in_size,
                layer.x.in_size,
                problem.groups * layer.group_in,
                layer.y.out_size,
                layer.x.out_size,
                problem.groups * layer.group_out,
                -(-layer.images // images) * tiles_y * tiles_x,
                tiles_y,
                tiles_x,
            ),
            shared_bytes=plan.shared_bytes,
        )
        return Recipe((launch,))
