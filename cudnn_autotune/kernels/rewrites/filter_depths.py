"""Filters of a 3-d convolution without the depths that meet nothing but padding."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.kernels.rewrites.packing import Packing
from cudnn_autotune.kernels.rewrites.rewrite import Form, Rewrite, is_channels_last


class FilterDepths(Rewrite):
    """A rewrite for inputs of few depths, such as images in a decoder of videos.

    Along the depth, with stride s, padding p and dilation d, tap t of output o reads depth
    ``o s + t d - p`` of the input. A tap whose depths all lie in the padding adds zeros to y, and
    what it adds to dx is not kept. So the filters are copied without those taps, and the padding
    shrinks with them. Of an image of one depth a single tap is left, which makes it a 2-d
    convolution: a causal layer of 3 x 3 x 3 has a third of the products.

    A weight that is not finite does not reach y from a tap that is left out.
    """

    name = "filter_depths"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a form of fprop or dgrad in 3-d if taps at the begin or the end of the depth meet
        nothing but padding."""
        if problem.spatial_dims != 3 or problem.op == "wgrad":
            return None
        depths, *kernel = problem.weight_shape[2:]
        met = _met(problem)
        if not met or met[-1] - met[0] == depths - 1:
            return None
        first, count = met[0], met[-1] - met[0] + 1
        dilation = problem.dilation[0]
        before = problem.padding[0] - first * dilation
        behind = problem.padding[3] - (depths - first - count) * dilation
        if min(before, behind) < 0:
            return None
        k, c = problem.weight_shape[:2]
        filters, numbers = (k, c) if is_channels_last(problem) else (k * c, 1)
        numbers *= math.prod(kernel)
        packing = Packing(
            *(filters, (depths, 1), numbers, numbers, filters, (count, 1)), offset=(-first, 0)
        )
        inner = replace(
            problem,
            weight_shape=(k, c, count, *kernel),
            padding=(before, *problem.padding[1:3], behind, *problem.padding[4:]),
        )
        if count == problem.input_shape[2] == problem.output_shape[2] == 1:
            inner = _of_images(inner)
        return Form(inner, {"w": packing})


def _met(problem: ConvProblem) -> list[int]:
    """Returns the taps along the depth that meet the input, in order."""
    size, outputs = problem.input_shape[2], problem.output_shape[2]
    stride, padding, dilation = problem.stride[0], problem.padding[0], problem.dilation[0]
    met = []
    for tap in range(problem.weight_shape[2]):
        # By this tap output o reads depth o * stride - begin.
        begin = padding - tap * dilation
        first, last = max(0, -(-begin // stride)), min(outputs, -(-(begin + size) // stride)) - 1
        if first <= last:
            met.append(tap)
    return met


def _of_images(problem: ConvProblem) -> ConvProblem:
    """Returns a problem with one depth, and filters of one, as a 2-d problem."""
    (n, c, _, *size), (k, of_group, _, *kernel) = problem.input_shape, problem.weight_shape
    return replace(
        problem,
        input_shape=(n, c, *size),
        weight_shape=(k, of_group, *kernel),
        stride=problem.stride[1:],
        padding=(*problem.padding[1:3], *problem.padding[4:]),
        dilation=problem.dilation[1:],
        memory_format=CHANNELS_LAST[2] if is_channels_last(problem) else torch.contiguous_format,
    )
