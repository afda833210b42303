"""Grouped convolutions in the terms of their kernels, and their division among blocks and warps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.cost_model import busiest_clocks, occupancy

_MOST_OFFERS = 4
_MOST_BLOCK_CHANNELS = 128
_L2_BYTES_A_CLOCK = 24
"""Approximate bytes to and from a multiprocessor, while all read and write."""
_L2_REQUEST_CLOCKS = 2.4
_L2_SECTOR_CLOCKS = 1.65
"""L2 clocks per request of up to 128 bytes, and per 32 bytes read, from each of 132 busy
multiprocessors, as measured on an H200."""
_MOST_ISSUED_A_CLOCK = 3.2
_WARPS_OF_HALF = 8
"""Instructions of a multiprocessor with very many warps, and the warps for half of that, as
measured on an H200."""
_COPY_INSTRUCTIONS = 8
"""Instructions of a warp for 32 copies."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a tile, as ``Axis`` of grouped_tile.cuh."""

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
        """Returns the input elements of ``tile`` units."""
        if not self.is_dgrad:
            return (tile - 1) * self.stride + self.kernel
        return tile + _reach(self)


@functools.lru_cache(maxsize=256)
def _reach(axis: Axis) -> int:
    """Returns the input elements of a gradient's tile beside one a unit."""
    ends = [
        ((phase + axis.pad) // axis.stride, axis.taps(phase))
        for phase in range(axis.phases)
        if axis.taps(phase)
    ]
    return max(end for end, _ in ends) - min(end - n + 1 for end, n in ends)


@dataclass(frozen=True)
class Layer:
    """A problem in the terms of the kernels: "in" is the tensor of a tile with a halo, "out" the
    tensor of its pixels. They are x and y, and for dgrad y and x."""

    images: int
    y: Axis
    x: Axis
    group_in: int
    group_out: int
    merge: int
    """Number of groups computed as one, whose width is a multiple of 8."""
    merged_groups: int
    element_bytes: int
    """2, or 4 for products in TF32."""

    @property
    def is_tf32(self) -> bool:
        return self.element_bytes == 4

    @property
    def chunk_bytes(self) -> int:
        """Bytes of 8 channels of a pixel."""
        return 8 * self.element_bytes

    @property
    def in_chunks(self) -> int:
        return self.merge * self.group_in // 8

    @property
    def out_chunks(self) -> int:
        return self.merge * self.group_out // 8


def _widest(problem: ConvProblem) -> int:
    """Returns the channels a group above which cuDNN's engines are faster, as measured on an H200
    (64 wide: 1.2 to 2.2 times). They are slow at gradients of the input with a stride."""
    return 64 if problem.op == "dgrad" and max(problem.stride) > 1 else 56


def layer_of(problem: ConvProblem) -> Layer | None:
    """Returns the problem in the kernels' terms, or None if they do not compute it."""
    c, k = problem.weight_shape[1], problem.weight_shape[0] // problem.groups
    merge = 1 if c % 8 == k % 8 == 0 else 2
    if not (
        problem.spatial_dims == 2
        and problem.memory_format == torch.channels_last
        and (problem.dtype in (torch.float16, torch.bfloat16) or problem.may_use_tf32)
        and problem.groups % merge == 0
        and problem.groups > 1
        and all(width % 4 == 0 and 4 <= width <= _widest(problem) for width in (c, k))
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
    element_bytes = problem.dtype.itemsize
    return Layer(x[0], vertical, horizontal, c, k, merge, problem.groups // merge, element_bytes)


@dataclass(frozen=True)
class Tile:
    """The simultaneous outputs of a block, of each phase."""

    images: int
    rows: int
    columns: int

    @property
    def pixels(self) -> int:
        return self.images * self.rows * self.columns

    def counts(self, layer: Layer) -> tuple[int, int, int]:
        """Returns the tiles of the layer: of images, of rows and of columns."""
        return (
            -(-layer.images // self.images),
            -(-layer.y.units // self.rows),
            -(-layer.x.units // self.columns),
        )

    def in_pixels(self, layer: Layer) -> int:
        """Returns the pixels of the input in shared memory."""
        columns = -(-layer.x.extent(self.columns) // layer.x.in_step) * layer.x.in_step
        return self.images * layer.y.extent(self.rows) * columns

    def read_pixels(self, layer: Layer) -> int:
        """Returns the largest number of a tile's input pixels inside the images."""
        return min(self.in_pixels(layer), self.images * layer.y.in_size * layer.x.in_size)


def tiles_of(layer: Layer) -> list[Tile]:
    """Returns tiles with a width of a multiple of 8, for the banks of shared memory."""
    height, width = layer.y.units, layer.x.units
    whole = -(-width // 8) * 8
    tiles = []
    parts = {height // n for n in (1, 2, 4) if height % n == 0 and height >= 4 * n}
    rows = sorted(y for y in {4, 8, 16, height} | parts if y < height + 4)
    for x in sorted({8, 16, whole}):
        for y in rows:
            if x > whole or x * y > 512:
                continue
            is_whole = y >= height and x >= width
            for images in (1, 2, 4, 8) if is_whole else (1,):
                if images == 1 or (images <= layer.images and images * x * y <= 256):
                    tiles.append(Tile(images, y, x))
    return tiles


def defines(layer: Layer, tile: Tile) -> dict[str, str | int]:
    """Returns the macros of grouped_tile.cuh but ELEMENT, BLOCK_GROUPS and WARPS."""
    return {
        "GROUP_IN": layer.group_in,
        "GROUP_OUT": layer.group_out,
        "MERGE": layer.merge,
        "KERNEL_Y": layer.y.kernel,
        "KERNEL_X": layer.x.kernel,
        "STRIDE_Y": layer.y.stride,
        "STRIDE_X": layer.x.stride,
        "PAD_Y": layer.y.pad,
        "PAD_X": layer.x.pad,
        "TILE_IMAGES": tile.images,
        "TILE_Y": tile.rows,
        "TILE_X": tile.columns,
    }


def arguments(layer: Layer, tile: Tile) -> tuple[int, ...]:
    """Returns a kernel's last arguments: the tensors' sizes and the numbers of tiles."""
    groups = layer.merge * layer.merged_groups
    images, tiles_y, tiles_x = tile.counts(layer)
    return (
        layer.images,
        *(layer.y.in_size, layer.x.in_size, groups * layer.group_in),
        *(layer.y.out_size, layer.x.out_size, groups * layer.group_out),
        *(images * tiles_y * tiles_x, tiles_y, tiles_x),
    )


@dataclass(frozen=True)
class Tiling:
    tile: Tile
    block_groups: int
    """Merged groups of a block."""
    warp: tuple[tuple[str, int], ...]
    """Macros of the simultaneous work of a warp."""
    stages: int
    warps: int
    shared_bytes: int
    runs: int
    """Blocks that share the tiles of the same groups."""
    blocks: int
    """Blocks that share the work of a tile and its groups."""
    resident: int
    """Resident blocks of a multiprocessor."""
    score: float
    """Estimated clocks of the layer, which rank tilings."""

    @property
    def settings(self) -> str:
        tile = f"{self.tile.images}x{self.tile.rows}x{self.tile.columns}"
        warp = ",".join(f"{name}={value}" for name, value in self.warp)
        return f"TILE={tile},BLOCK_GROUPS={self.block_groups},{warp},STAGES={self.stages}"


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def n_tiles_of(chunks: int) -> list[int]:
    """Returns a warp's possible numbers of ``chunks`` 8-channel tiles: at most 4, unless prime."""
    most = chunks if chunks in (5, 7) else max(d for d in divisors(chunks) if d <= 4)
    return [most, 2] if most == 4 else [most]


def block_groups_of(layer: Layer) -> list[int]:
    """Returns the possible numbers of merged groups of a block."""
    width = 8 * max(layer.in_chunks, layer.out_chunks)
    return [d for d in divisors(layer.merged_groups) if d == 1 or d * width <= _MOST_BLOCK_CHANNELS]


@dataclass(frozen=True)
class Work:
    """The work of a block for a tile."""

    mma: float
    """Matrix products of 16 x 8 x 16 (16 x 8 x 8 in TF32) in all warps."""
    matrices: float
    """Loads of matrices of 128 bytes from shared memory by all warps."""
    instructions: float
    """Instructions of all warps, except copies to shared memory."""
    copies: int
    """Copies of 16 bytes to shared memory."""
    in_pixels: int
    """Input pixels inside the images."""
    out_pixels: int
    out_bytes: int
    """Adjacent, or together copied, bytes of an output pixel."""
    out_loads: int
    """Passes of an output through shared memory."""
    once_bytes: float = 0.0
    """Bytes moved once per block."""


def tiling_of(
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
) -> Tiling | None:
    """Returns the tiling with its blocks and its score, or None if no block fits."""
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

    # Clocks of a tile. Tensor cores multiply 1024 pairs a clock (512 in TF32), shared among warps
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
    # Only other blocks fill the pauses of a block that waits for its tile.
    pause = (1.0 if stages == 1 else 0.4) / resident
    once = resident * work.once_bytes / _L2_BYTES_A_CLOCK
    score = busiest_clocks(rounds * resident, clocks * (1 + pause), rounds, alone) + once
    return Tiling(
        *(tile, block_groups, tuple(warp.items()), stages, warps, shared_bytes),
        *(runs, blocks, resident, score),
    )


@functools.lru_cache(maxsize=256)
def _requests(together: int, most: int) -> float:
    """Returns the number of aligned chunks of ``most`` bytes touched by ``together`` adjacent
    bytes, on average over neighbours."""
    ends = [together * i for i in range(9)]
    return sum(-(-end // most) - start // most for start, end in itertools.pairwise(ends)) / 8


def best(tilings: Iterable[Tiling]) -> tuple[Tiling, ...]:
    """Returns the best, and others that differ from better ones in two of groups, tile and stages,
    which no estimate decides."""
    chosen: list[Tiling] = []
    for tiling in sorted(tilings, key=lambda tiling: tiling.score):
        if len(chosen) < _MOST_OFFERS and all(
            sum(
                (
                    tiling.tile != p.tile,
                    tiling.block_groups != p.block_groups,
                    tiling.stages != p.stages,
                )
            )
            > 1
            for p in chosen
        ):
            chosen.append(tiling)
    return tuple(chosen)
