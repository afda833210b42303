"""A strided convolution with a kernel of one element, as a dense one of the pixels it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.rewrites.packing import Packing, pair
from cudnn_autotune.kernels.rewrites.rewrite import Form, Rewrite, is_channels_last, may_use_half

_FEWEST: Mapping[str, int] = {"fprop": 1024, "dgrad": 512}
"""Input channels from which the copy is cheap beside the product, as measured on an H200."""


class SlicedPointwise(Rewrite):
    """Gathers the pixels that are read, so that a stride of 1 is left.

    With a kernel of 1 x 1, stride s and padding p, output pixel o depends on input pixel
    ``o * s - p`` alone. Let x'[o] be that pixel, or zero in the padding. Then

    - fprop: ``y[o] = w x'[o]``, a convolution of stride 1 without padding;
    - dgrad: ``dx'[o] = w^T dy[o]`` is that of stride 1, and dx is dx' at the pixels that are read,
      zero elsewhere.

    A matrix product is left, for which every engine is made, and in dgrad the engines for strides,
    which are slow, are avoided. The price is that x' (dx') is written and read once more.

    Non-finite values go where the engine sends them, since no product is added.
    """

    name = "sliced_pointwise"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a form in ``channels_last`` for many channels if a stride in height or width is
        not 1, and that of the depth is 1."""
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
