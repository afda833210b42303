"""The layout in shared memory of rows of images with few channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cudnn_autotune.engines.problem import ConvProblem, as_images
from cudnn_autotune.kernels.sources import ELEMENTS

_MOST_CHANNELS = 16
_MOST_FILTERS = 8
"""Most filters of a contiguous layer with more channels."""
_MOST_OUTPUT_CHANNELS = 65536
"""A grid has at most 65535 blocks along output channels."""
_MOST_ELEMENTS = 2**30
"""Elements of a padded row of the image, and its padded rows and depths: the kernels count them in
32 bits."""


def with_images(problem: ConvProblem) -> ConvProblem:
    """Returns the problem, a 1-d one with images of height 1."""
    return as_images(problem) if problem.spatial_dims == 1 else problem


def forward_view(problem: ConvProblem) -> ConvProblem | None:
    """Returns the problem as a forward convolution of images or volumes; None if it is none."""
    if problem.op == "wgrad":
        return None
    images = with_images(problem)
    if images.op == "fprop":
        return images
    (k, c, *kernel), (x, w, y) = images.weight_shape, images.alignment
    padding = tuple(kernel[i % len(kernel)] - 1 - p for i, p in enumerate(images.padding))
    if images.groups > 1 or max(images.stride) > 1 or max(images.dilation) > 1 or min(padding) < 0:
        return None
    return replace(
        images,
        op="fprop",
        input_shape=images.output_shape,
        weight_shape=(c, k, *kernel),
        padding=padding,
        alignment=(y, w, x),
    )


def is_computed(problem: ConvProblem, is_planar: bool = False) -> bool:
    """Returns whether a kernel for few channels computes a problem of its operation.

    Args:
        is_planar: whether the kernel's memory format is contiguous, or else channels_last.
    """
    if problem.spatial_dims not in (2, 3):
        return False
    dims = problem.spatial_dims
    padded = map(
        sum,
        zip(problem.input_shape[2:], problem.padding[:dims], problem.padding[dims:], strict=True),
    )
    channels, filters = problem.input_shape[1], problem.weight_shape[0]
    return (
        (channels <= _MOST_CHANNELS or (is_planar and filters <= _MOST_FILTERS))
        and channels * max(padded) < _MOST_ELEMENTS
        and (problem.memory_format == torch.contiguous_format) == is_planar
        and (problem.dtype in (torch.float16, torch.bfloat16) or problem.may_use_tf32)
        and problem.groups == 1
        and max(problem.dilation) == 1
        and filters <= _MOST_OUTPUT_CHANNELS
        and problem.alignment[2] >= 16
    )


@dataclass(frozen=True)
class Rows:
    """Sizes that a problem determines, by the names in few_channels_rows.cuh."""

    problem: ConvProblem
    """The problem, with two or three dimensions."""

    @cached_property
    def kernel(self) -> tuple[int, int, int]:
        """Depth, height and width of a window. An image has depth 1."""
        return _depth_first(self.problem.weight_shape[2:], 1)

    @cached_property
    def stride(self) -> tuple[int, int, int]:
        return _depth_first(self.problem.stride, 1)

    @property
    def padding(self) -> tuple[int, int, int]:
        """Elements before each dimension."""
        return _depth_first(self.problem.padding[: self.problem.spatial_dims], 0)

    @cached_property
    def output(self) -> tuple[int, int, int]:
        """Depth, height and width of an output."""
        return _depth_first(self.problem.output_shape[2:], 1)

    @property
    def is_planar(self) -> bool:
        """Whether the channels of an image are planes, and not together in its pixels."""
        return self.problem.memory_format == torch.contiguous_format

    @property
    def pair(self) -> int:
        """Elements of a register."""
        return 4 // self.problem.dtype.itemsize

    @cached_property
    def channels(self) -> int:
        """Adjacent elements of a pixel."""
        return 1 if self.is_planar else self.problem.input_shape[1]

    @cached_property
    def planes(self) -> int:
        """Planes of the input in a window."""
        return self.problem.input_shape[1] // self.channels * self.kernel[0]

    @property
    def row(self) -> int:
        return self.kernel[2] * self.channels

    @cached_property
    def pixel_step(self) -> int:
        return self.stride[2] * self.channels

    @cached_property
    def left(self) -> int:
        """Elements of a tile before its first window, so that a row begins at a multiple of 8."""
        return -self.channels * self.padding[2] % 8

    @cached_property
    def copy(self) -> int:
        """The most elements of a copy: rows of the image begin at a multiple."""
        row_elements = self.problem.input_shape[-1] * self.channels
        size = self.problem.dtype.itemsize
        most = min(self.problem.alignment[0], 16) // size
        return next((n for n in (8, 4, 2) if row_elements % n == 0 and n <= most), 1)

    def pitch(self, columns: int, window: int) -> int:
        """Returns the elements of a row of a tile, whose windows have ``window`` elements a row."""
        return -(-(self.left + self.pixel_step * (columns - 1) + window) // 8) * 8

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros of few_channels_rows.cuh but those of the tile."""
        return {
            "ELEMENT": ELEMENTS[self.problem.dtype],
            "CHANNELS": self.channels,
            "PLANES": self.planes,
            "IS_3D": int(self.problem.spatial_dims == 3),
            **dict(zip(("KERNEL_D", "KERNEL_H", "KERNEL_W"), self.kernel, strict=True)),
            **dict(zip(("STRIDE_D", "STRIDE_H", "STRIDE_W"), self.stride, strict=True)),
            "LEFT": self.left,
            "COPY": self.copy,
        }

    def grid(self, rows: int, columns: int) -> tuple[int, int, int]:
        """Returns the tiles along the output's rows and columns, and all tiles.

        Args:
            rows, columns: output pixels of a tile.
        """
        depth, p, q = self.output
        tiles_p, tiles_q = -(-p // rows), -(-q // columns)
        return tiles_p, tiles_q, self.problem.output_shape[0] * depth * tiles_p * tiles_q

    def arguments(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the sizes that a kernel gets, of which the last is the number of tiles."""
        return (*self.sizes, *self.grid(rows, columns))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that a kernel gets, but for the tiles."""
        sizes = _depth_first(self.problem.input_shape[2:], 1)
        return (*sizes, self.problem.output_shape[1], *self.output, *self.padding)


def _depth_first(sizes: Sequence[int], depth: int) -> tuple[int, int, int]:
    """Returns the sizes of three dimensions; ``depth`` is that of an image."""
    front, height, width = (depth, *sizes)[-3:]
    return front, height, width
