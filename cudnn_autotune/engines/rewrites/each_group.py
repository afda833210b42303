"""Groups of many channels, each as a convolution of its own on slices of channels."""

from __future__ import annotations

import math
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import MOST_ALIGNED, ConvProblem
from cudnn_autotune.engines.recipe import Address, EngineLaunch, Recipe
from cudnn_autotune.engines.rewrites.rewrite import Form, Rewrite, is_channels_last, may_use_half

_LEAST_CHANNELS = 64
"""Input and output channels of a group from which an engine for it alone is busy with products."""
_MOST_GROUPS = 32


class EachGroup(Rewrite):
    """Runs an engine once for each group.

    In channels_last a group's part of the input and of the output is a slice of the channels, which
    engines for problems without groups read and write where it lies (``pixel_strides``). cuDNN's
    engines for many channels a group do the same on copies of the slices. Such layers are those
    whose images have weights of their own, as StyleGAN2's: the images are groups of one image.
    """

    name = "each_group"
    note = "TENSOR_CORE"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns the problem of one group, where groups have many channels."""
        groups = problem.groups
        channels, kernels = problem.weight_shape[1], problem.weight_shape[0] // groups
        step = MOST_ALIGNED // problem.dtype.itemsize
        if (
            problem.op != "fprop"
            or not is_channels_last(problem)
            or not may_use_half(problem, gpu)
            or not 1 < groups <= _MOST_GROUPS
            or min(channels, kernels) < _LEAST_CHANNELS
            or channels % step
            or kernels % step
            or problem.residual
            or problem.alignment != (MOST_ALIGNED,) * 3
        ):
            return None
        images, all_channels, *space = problem.input_shape
        inner = replace(
            problem,
            input_shape=(images, channels, *space),
            weight_shape=(kernels, *problem.weight_shape[1:]),
            groups=1,
            pixel_strides=(all_channels, kernels * groups),
        )
        return Form(inner, {})

    def build(self, problem: ConvProblem, form: Form, engine_text: str) -> Recipe:
        inner, size = form.inner, problem.dtype.itemsize
        kernels, channels, *taps = inner.weight_shape
        launches = tuple(
            EngineLaunch(
                inner,
                engine_text,
                x=Address("x", group * channels * size),
                w=Address("w", group * kernels * channels * math.prod(taps) * size),
                y=Address("y", group * kernels * size),
                bias=Address("bias", group * kernels * size) if problem.bias else None,
            )
            for group in range(problem.groups)
        )
        return Recipe(launches)
