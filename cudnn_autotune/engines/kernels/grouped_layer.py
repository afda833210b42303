"""Grouped convolutions in the words of their kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.problem import ConvProblem


@dataclass(frozen=True)
class Axis:
    """One dimension of a tile, as ``Axis`` of grouped_tile.cuh has it."""

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
        return tile + _reach(self)


@functools.lru_cache(maxsize=256)
def _reach(axis: Axis) -> int:
    """Input elements that a tile of a gradient reads beside one a unit."""
    ends = [
        ((phase + axis.pad) // axis.stride, axis.taps(phase))
        for phase in range(axis.phases)
        if axis.taps(phase)
    ]
    return max(end for end, _ in ends) - min(end - n + 1 for end, n in ends)


@dataclass(frozen=True)
class Layer:
    """A problem in the words of the kernels: "in" is what a tile with a halo is read of, "out" what
    its pixels are: x and y, and for dgrad y and x."""

    images: int
    y: Axis
    x: Axis
    group_in: int
    group_out: int
    merge: int
    """Groups that are computed as one, whose width is a multiple of 8."""
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
    """Channels a group above which cuDNN's engines are faster, as measured on an H200 (64 wide:
    1.2 to 2.2 times). They are slow at gradients of the input with a stride."""
    return 64 if problem.op == "dgrad" and max(problem.stride) > 1 else 56


def layer_of(problem: ConvProblem) -> Layer | None:
    """Returns the problem in the kernels' words, or None if they do not compute it."""
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
    """The outputs that a block computes at a time, of each phase."""

    images: int
    rows: int
    columns: int

    @property
    def pixels(self) -> int:
        return self.images * self.rows * self.columns

    def counts(self, layer: Layer) -> tuple[int, int, int]:
        """Tiles of the layer: of images, of rows and of columns."""
        return (
            -(-layer.images // self.images),
            -(-layer.y.units // self.rows),
            -(-layer.x.units // self.columns),
        )

    def in_pixels(self, layer: Layer) -> int:
        """Pixels of the input in shared memory."""
        columns = -(-layer.x.extent(self.columns) // layer.x.in_step) * layer.x.in_step
        return self.images * layer.y.extent(self.rows) * columns

    def read_pixels(self, layer: Layer) -> int:
        """At most so many of them lie in the images."""
        return min(self.in_pixels(layer), self.images * layer.y.in_size * layer.x.in_size)


def tiles_of(layer: Layer) -> list[Tile]:
    """Returns tiles whose width is a multiple of 8, as the banks of shared memory want it."""
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
