"""A strided convolution with a kernel of one element, as a dense one of the pixels it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.rewrites.packing import Packing
from cudnn_autotune.engines.rewrites.rewrite import Form, Rewrite, inner_problem


class SlicedPointwise(Rewrite):
    """Gathers the pixels that are read, so that a stride of 1 is left.

    With a kernel of 1 x 1, stride s and padding p, output pixel o depends on input pixel
    ``o * s - p`` alone. Let x'[o] be that pixel, or zero in the padding. Then

    - fprop: ``y[o] = w x'[o]``, a convolution of stride 1 without padding;
    - wgrad: ``dw = sum over o of dy[o] x'[o]``, the same of x';
    - dgrad: ``dx'[o] = w^T dy[o]`` is that of stride 1, and dx is dx' at the pixels that are read,
      zero elsewhere.

    A matrix product is left, for which every engine is made, and in dgrad the engines for strides,
    which are slow, are avoided. The price is that x' (dx') is written and read once more.

    Non-finite values go where the definition sends them, since no product is added.
    """

    name = "sliced_pointwise"

    def forms(self, problem: ConvProblem, gpu: Gpu) -> Sequence[Form]:
        """Returns one form if a stride in height or width is not 1, and that of the depth is 1."""
        n = problem.spatial_dims
        sliced = range(max(0, n - 2), n)
        if problem.groups > 1 or math.prod(problem.weight_shape[2:]) > 1:
            return ()
        if all(s == 1 for s in problem.stride) or (n == 3 and problem.stride[0] > 1):
            return ()
        height, width = _pair(problem.input_shape[2:], 1)
        out = _pair(problem.output_shape[2:], 1)
        stride = _pair(problem.stride, 1)
        before = _pair(problem.padding[:n], 0)
        is_contiguous = problem.memory_format == torch.contiguous_format
        channels = 1 if is_contiguous else problem.input_shape[1]
        images = math.prod(problem.input_shape) // (height * width * channels)
        read = [(o - 1) * s + 1 - p for o, s, p in zip(out, stride, before, strict=True)]
        x = Packing(
            images,
            (height, width),
            channels,
            channels,
            images,
            out,
            stride=stride,
            offset=before,
            limit=(read[0], read[1]),
        )
        input_shape, padding = list(problem.input_shape), list(problem.padding)
        for d in sliced:
            input_shape[2 + d] = problem.output_shape[2 + d]
            padding[d] = padding[n + d] = 0
        changes = {"input_shape": input_shape, "stride": 1, "padding": padding}
        return [Form(inner_problem(problem, {"x": x}, **changes), {"x": x})]


def _pair(values: Sequence[int], absent: int) -> tuple[int, int]:
    """Those of height and width, of which the former is ``absent`` in one dimension."""
    height, width = (absent, *values)[-2:]
    return height, width
