"""The sizes of depthwise problems, as the kernels of this folder see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address
from cudnn_autotune.kernels.family import INT32_MAX, MMA_CAPABILITY
from cudnn_autotune.kernels.sources import ELEMENTS

_MOST_DILATION = 1024


@dataclass(frozen=True)
class Dimension:
    """One spatial dimension of a problem."""

    size: int
    """Pixels of x."""
    output: int
    """Pixels of y."""
    taps: int
    stride: int
    padding: int
    dilation: int

    def residue_length(self, op: str) -> int:
        """Returns the number of y pixels that share inputs: those at a distance of the dilation.
        For dgrad they are groups of ``stride`` x pixels."""
        if op != "dgrad":
            return -(-self.output // self.dilation)
        period = self.stride * self.dilation
        starts = (self.stride * r - self.padding for r in range(self.dilation))
        return max((self.size - 1 - s) // period - (-s) // period + 1 for s in starts)


def dimensions(problem: ConvProblem) -> tuple[Dimension, Dimension, Dimension]:
    """Returns depth, height and width; missing ones have one pixel."""
    found = [
        Dimension(*values)
        for values in zip(
            problem.input_shape[2:],
            problem.output_shape[2:],
            problem.weight_shape[2:],
            problem.stride,
            problem.padding,
            problem.dilation,
            strict=False,
        )
    ]
    depth, height, width = [Dimension(1, 1, 1, 1, 0, 1)] * (3 - len(found)) + found
    return depth, height, width


@dataclass(frozen=True)
class Layer:
    """A depthwise problem in the terms of the kernels on CUDA cores."""

    op: str
    images: int
    channels: int
    depth: Dimension
    height: Dimension
    width: Dimension
    itemsize: int
    alignment: int
    """Alignment of x and y in bytes."""

    @classmethod
    def of(cls, problem: ConvProblem) -> Self:
        return cls(
            *(problem.op, problem.input_shape[0], problem.groups, *dimensions(problem)),
            itemsize=problem.dtype.itemsize,
            alignment=min(problem.alignment[0], problem.alignment[2]),
        )

    @property
    def taps(self) -> int:
        """Taps of one depth."""
        return self.height.taps * self.width.taps

    @property
    def slots(self) -> int:
        """Rows of y with a product with a row of x, in one depth."""
        return -(-self.height.taps // self.height.stride)

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows and columns that share inputs (``Dimension.residue_length``)."""
        return self.height.residue_length(self.op), self.width.residue_length(self.op)


@dataclass(frozen=True)
class PlanarLayer:
    """A depthwise problem of one or two dimensions and of stride 1, with height and width. A dgrad
    is the forward convolution of dy."""

    images: int
    channels: int
    in_size: tuple[int, int]
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    padding: tuple[int, int]
    """Padding before the first row and column; negative if a gradient has surplus columns."""
    is_channels_last: bool
    alignment: int
    """Alignment of x and y in bytes."""

    @classmethod
    def of(cls, problem: ConvProblem) -> Self:
        _, height, width = dimensions(problem)
        in_size, out_size = (height.size, width.size), (height.output, width.output)
        kernel, padding = (height.taps, width.taps), (height.padding, width.padding)
        if problem.op == "dgrad":
            in_size, out_size = out_size, in_size
            padding = (kernel[0] - 1 - padding[0], kernel[1] - 1 - padding[1])
        return cls(
            *(problem.input_shape[0], problem.groups, in_size, out_size, kernel, padding),
            is_channels_last=problem.memory_format == torch.channels_last,
            alignment=min(problem.alignment[0], problem.alignment[2]),
        )

    @property
    def is_signal(self) -> bool:
        """Whether it has one row, whose segments are computed as rows."""
        return self.in_size[0] == self.out_size[0] == self.kernel[0] == 1 and not self.padding[0]


def is_dilation_small(problem: ConvProblem) -> bool:
    """Returns whether the dilation is small. Kernels share pixels by their residues modulo the
    dilation: then most threads have pixels, and loops over residues are quick."""
    return all(
        d.dilation <= min(_MOST_DILATION, 2 * d.size, 2 * d.output) for d in dimensions(problem)[1:]
    )


def is_depthwise(problem: ConvProblem) -> bool:
    """Returns whether each output channel has one input channel, and 32 bits suffice for the pixel
    counts of this folder's kernels."""
    return (
        problem.op in ("fprop", "dgrad")
        and problem.dtype in ELEMENTS
        and problem.weight_shape[1] == 1
        and problem.groups > 1
        and (problem.op == "fprop" or problem.weight_shape[0] == problem.groups)
        # If they have a common divisor, some x pixels reach no y pixel, and are in no tile.
        and (
            problem.op == "fprop"
            or all(math.gcd(d.stride, d.dilation) == 1 for d in dimensions(problem)[1:])
        )
        and is_dilation_small(problem)
        and all(
            d.size + 2 * d.padding + 256 * d.stride * d.dilation <= INT32_MAX
            for d in dimensions(problem)
        )
    )


def is_for_tensor_cores(problem: ConvProblem, gpu: Gpu) -> bool:
    """Returns whether products bound the problem, and tensor cores can compute them: large kernels
    at stride 1 in the half types."""
    return (
        gpu.compute_capability >= MMA_CAPABILITY
        and problem.dtype != torch.float32
        and problem.spatial_dims < 3
        and math.prod(problem.weight_shape[2:]) > 25
        and all(n == 1 for n in (*problem.stride, *problem.dilation))
    )


def added(problem: ConvProblem) -> list[Address]:
    """Returns the arguments of a kernel's epilogue."""
    return [Address("bias")] * problem.bias + [Address("residual")] * problem.residual


def is_depthwise_wgrad(problem: ConvProblem) -> bool:
    """Returns whether it is a depthwise wgrad with a multiplier of 1, and 32 bits suffice for the
    kernels' counts of rows and columns."""
    taps = [d * k for d, k in zip(problem.dilation, problem.weight_shape[2:], strict=True)]
    tiles = [64 * d * s for d, s in zip(problem.dilation, problem.stride, strict=True)]
    return (
        problem.op == "wgrad"
        and problem.dtype in ELEMENTS
        and 1 < problem.groups == problem.input_shape[1] == problem.weight_shape[0]
        and max(*problem.input_shape[2:], *problem.padding, *taps, *tiles) < 1 << 29
    )
