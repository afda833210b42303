"""A strided convolution with a kernel of one element, as a dense one of its read pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.rewrites.packing import Packing, pair
from cudnn_autotune.kernels.rewrites.rewrite import Form, Rewrite, is_channels_last, may_use_half

_FEWEST: Mapping[str, int] = {"fprop": 1024, "dgrad": 512}
"""Input channels from which the copy is cheap relative to the product, as measured on an H200."""


class SlicedPointwise(Rewrite):
    """A rewrite that gathers the read pixels, so that the stride becomes 1.

    With a kernel of 1 x 1, stride s and padding p, output pixel o depends on input pixel
    ``o * s - p`` alone. Let x'[o] be that pixel, or zero in the padding. Then

    - fprop: ``y[o] = w x'[o]``, a convolution of stride 1 without padding;
    - dgrad: ``dx'[o] = w^T dy[o]`` has stride 1, and dx is dx' at the read pixels, zero elsewhere.

    The result is a matrix product, for which every engine is made, and dgrad avoids the slow
    engines for strides. The price is one more write and read of x' (dx').

    Non-finite values spread as in the engine, since no product is added.
    """

    name = "sliced_pointwise"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a form in ``channels_last`` for many channels if a stride in height or width is
        not 1, and the depth's is 1."""
        n = problem.spatial_dims
        if not is_channels_last(problem) or not may_use_half(problem, gpu):
            return None
        if problem.groups > 1 or math.prod(problem.weight_shape[2:]) > 1:
            return None
        if all(s == 1 for s in problem.stride) or (n == 3 and problem.stride[0] > 1):
            return None
        fewest = _FEWEST.get(problem.op)
        if fewest is None or problem.input_shape[1] < fewest:
            return None
        return _form(problem)


def _form(problem: ConvProblem) -> Form:
    n, channels = problem.spatial_dims, problem.input_shape[1]
    size, out = pair(problem.input_shape[-2:]), pair(problem.output_shape[-2:])
    stride, before = pair(problem.stride[-2:]), pair(problem.padding[n - 2 : n])
    images = math.prod(problem.input_shape) // (channels * math.prod(size))
    read = [(o - 1) * s + 1 - p for o, s, p in zip(out, stride, before, strict=True)]
    x = Packing(
        *(images, size, channels, channels, images, out),
        stride=stride,
        offset=before,
        limit=pair(read),
    )
    depth = n - 2
    inner = replace(
        problem,
        input_shape=(*problem.input_shape[:-2], *out),
        stride=(1,) * n,
        padding=(*problem.padding[:depth], 0, 0, *problem.padding[n : n + depth], 0, 0),
    )
    return Form(inner, {"x": x})
