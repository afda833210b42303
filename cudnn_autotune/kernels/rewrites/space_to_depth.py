"""Space to depth: a stride becomes channels, for first layers, which have few."""

from __future__ import annotations

import math
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Buffer
from cudnn_autotune.kernels.rewrites import patches
from cudnn_autotune.kernels.rewrites.packing import Packing, pair
from cudnn_autotune.kernels.rewrites.rewrite import (
    Form,
    Rewrite,
    is_channels_last,
    may_use_tf32,
    round_up,
)

_GRANULE = 4
"""The divisor of channels for engines in TF32."""
_MOST_CHANNELS = 8
"""Input channels above which tensor cores are busy without this rewrite."""


class SpaceToDepth(Rewrite):
    """A rewrite that turns the pixels of a stride into channels, so that the stride becomes 1.

    Along one dimension, with stride s, padding p and kernel size k,
    ``y[o] = sum over t < k of w[t] x[o s + t - p]``. With ``t = s t' + f`` and f < s this is
    ``sum over t', f of w'[t'][f] x'[o + t'][f]``. Here ``x'[i][f]`` is ``x[i s + f - p]``, and
    ``w'[t'][f]`` is ``w[s t' + f]``; both are zero without such a pixel or tap. So it is a
    convolution of stride 1 without padding, with ``ceil(k / s)`` taps and s times the channels (in
    two dimensions, the product of both strides). x' has ``outputs + taps - 1`` pixels. Each of the
    rows f of a pixel is padded with zeros to a part of the tensor cores' multiple. wgrad's dw is
    dw' at the places by the definition of w'.

    7 x 7 with stride 2 and 3 channels becomes 4 x 4 with 12 channels, and a kernel as large as its
    stride a matrix product; ``patches`` computes large ones of these. Only height and width are
    folded; a depth keeps its stride.

    If k is not a multiple of s, the added taps of w' multiply pixels behind the kernel by zero. So
    in fprop a non-finite value spreads up to s - 1 pixels farther than by the definition, as in the
    tiles of cuDNN's Winograd engines. Pixels without outputs stay out of x', so a search of the
    whole result for NaN has the same answer. wgrad does not spread.
    """

    name = "space_to_depth"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a form for few channels in ``channels_last`` and TF32, a stride no larger than
        the kernel, and few added taps. Others did not gain on an H200, nor do 16-bit types, for
        which the package has kernels."""
        if patches.is_computed(problem):
            return None
        is_dense = problem.groups == 1 and all(d == 1 for d in problem.dilation[-2:])
        if not may_use_tf32(problem, gpu) or not is_dense or not is_channels_last(problem):
            return None
        stride, kernel = problem.stride[-2:], problem.weight_shape[-2:]
        n = problem.spatial_dims
        before, after = problem.padding[n - 2 : n], problem.padding[-2:]
        c, k = problem.input_shape[1], problem.weight_shape[0]
        if problem.op == "dgrad" or c > _MOST_CHANNELS or k % _GRANULE or math.prod(stride) == 1:
            return None
        if any(s > size for s, size in zip(stride, kernel, strict=True)):
            return None  # pixels are skipped
        if any(p >= size for p, size in zip(before + after, kernel * 2, strict=True)):
            return None  # the taps behind the kernel would reach a pixel without outputs
        taps = math.prod(round_up(size, s) for size, s in zip(kernel, stride, strict=True))
        if 2 * taps > 3 * math.prod(kernel):
            return None
        return _form(problem, round_up(stride[1] * c, _GRANULE // math.gcd(_GRANULE, stride[0])))


def _form(problem: ConvProblem, run: int) -> Form:
    """Returns the form with rows of a packed pixel padded to ``run`` elements."""
    n = problem.spatial_dims
    stride, kernel = pair(problem.stride[-2:]), pair(problem.weight_shape[-2:])
    size, out = pair(problem.input_shape[-2:]), pair(problem.output_shape[-2:])
    before = pair(problem.padding[n - 2 : n])
    c, k = problem.input_shape[1], problem.weight_shape[0]
    taps = pair([-(-t // s) for t, s in zip(kernel, stride, strict=True)])
    packed = pair([o + t - 1 for o, t in zip(out, taps, strict=True)])
    read = [(o - 1) * s + t - p for o, s, t, p in zip(out, stride, kernel, before, strict=True)]
    images = math.prod(problem.input_shape) // (c * math.prod(size))
    filters = k * math.prod(problem.weight_shape[2:]) // math.prod(kernel)
    packings: dict[Buffer, Packing] = {
        "x": Packing(
            *(images, size, c, run, images, packed),
            stride=stride,
            phases=stride,
            offset=before,
            limit=pair(read),
        ),
        "w": Packing(*(filters, kernel, c, run, filters, taps), stride=stride, phases=stride),
    }
    depth, channels = n - 2, stride[0] * run
    padding = (*problem.padding[:depth], 0, 0, *problem.padding[n : n + depth], 0, 0)
    inner = replace(
        problem,
        input_shape=(problem.input_shape[0], channels, *problem.input_shape[2:-2], *packed),
        weight_shape=(k, channels, *problem.weight_shape[2:-2], *taps),
        stride=(*problem.stride[:depth], 1, 1),
        padding=padding,
    )
    return Form(inner, packings)
