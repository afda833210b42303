"""The layout in shared memory of rows of images with few channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.sources import ELEMENTS

_MOST_CHANNELS = 8
_MOST_OUTPUT_CHANNELS = 65536
"""A grid has at most 65535 blocks along output channels."""
_MOST_ELEMENTS = 2**30
"""Elements of a padded row of the image: the kernels count them in 32 bits."""


def is_computed(
    problem: ConvProblem,
    in_tf32: bool = False,
    memory_format: torch.memory_format = torch.channels_last,
) -> bool:
    """Returns whether a kernel for few channels computes a problem of its operation.

    Args:
        in_tf32: whether the kernel computes in TF32, too.
        memory_format: the kernel's memory format.
    """
    if problem.spatial_dims != 2:
        return False
    padded_width = problem.input_shape[3] + problem.padding[1] + problem.padding[3]
    channels, filters = problem.input_shape[1], problem.weight_shape[0]
    if memory_format == torch.contiguous_format:
        # Also from many channels to few ones.
        are_few = (channels <= _MOST_CHANNELS) == (filters >= _MOST_CHANNELS)
    else:
        are_few = channels <= _MOST_CHANNELS and filters % 8 == 0
    return (
        are_few
        and channels * padded_width < _MOST_ELEMENTS
        and problem.memory_format == memory_format
        and (problem.dtype in (torch.float16, torch.bfloat16) or (in_tf32 and problem.may_use_tf32))
        and problem.groups == 1
        and problem.dilation == (1, 1)
        and filters <= _MOST_OUTPUT_CHANNELS
        and problem.alignment[2] >= 16
    )


@dataclass(frozen=True)
class Rows:
    """Sizes that a problem determines, by the names in few_channels_rows.cuh."""

    problem: ConvProblem
    """The problem, with two dimensions."""

    @property
    def is_planar(self) -> bool:
        """Whether the channels of an image are planes, and not together in its pixels."""
        return self.problem.memory_format == torch.contiguous_format

    @property
    def channels(self) -> int:
        """Adjacent elements of a pixel."""
        return 1 if self.is_planar else self.problem.input_shape[1]

    @property
    def planes(self) -> int:
        return self.problem.input_shape[1] // self.channels

    @property
    def row(self) -> int:
        return self.problem.weight_shape[3] * self.channels

    @property
    def pixel_step(self) -> int:
        return self.problem.stride[1] * self.channels

    @property
    def left(self) -> int:
        """Elements of a tile before its first window, so that a row begins at a multiple of 8."""
        return -self.channels * self.problem.padding[1] % 8

    @property
    def copy(self) -> int:
        """The most elements of a copy: rows of the image begin at a multiple."""
        row_elements = self.problem.input_shape[3] * self.channels
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
            "KERNEL_H": self.problem.weight_shape[2],
            "KERNEL_W": self.problem.weight_shape[3],
            "STRIDE_H": self.problem.stride[0],
            "STRIDE_W": self.problem.stride[1],
            "LEFT": self.left,
            "COPY": self.copy,
        }
