"""A convolution of wide groups, as one convolution for each group."""

from __future__ import annotations

import math
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import MOST_ALIGNED, ConvProblem
from cudnn_autotune.engines.recipe import Address, EngineLaunch, Recipe
from cudnn_autotune.engines.rewrites.rewrite import Form, Rewrite, is_channels_last, may_use_half

_LEAST_CHANNELS = 64
"""Channels of a group, in and out, from which its product alone may keep a GPU busy."""
_MOST_GROUPS = 64


class EachGroup(Rewrite):
    """Runs an engine on the channels of one group after the other, as they lie.

    In channels_last a group's channels are slices of the tensors, whose pixels are further apart
    than they are long. Engines of cuDNN 9.19 for groups run on dense copies of the slices, one
    group after the other. Engines for one group take a distance between pixels as it is.

    Such groups are the images of StyleGAN2, each of which has filters of its own.

    Settings are the text of the engine.
    """

    name = "each_group"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a group's problem, in ``channels_last`` and half types, for fprop."""
        groups, (k, c, *_) = problem.groups, problem.weight_shape
        outputs = k // groups
        step = MOST_ALIGNED // problem.dtype.itemsize
        if (
            problem.op != "fprop"
            or not is_channels_last(problem)
            or not may_use_half(problem, gpu)
            or not 1 < groups <= _MOST_GROUPS
            or min(c, outputs) < _LEAST_CHANNELS
            or c % step
            or outputs % step
            or problem.alignment != (MOST_ALIGNED,) * 3
            or problem.residual
        ):
            return None
        images, channels, *size = problem.input_shape
        inner = replace(
            problem,
            input_shape=(images, c, *size),
            weight_shape=(outputs, *problem.weight_shape[1:]),
            groups=1,
            pixel_strides=(channels, k),
        )
        return Form(inner, {})

    def build(self, problem: ConvProblem, form: Form, engine_text: str) -> Recipe:
        """Returns a launch of the engine for each group."""
        inner = form.inner
        outputs, c = inner.weight_shape[:2]
        size = problem.dtype.itemsize
        filters = math.prod(inner.weight_shape)
        return Recipe(
            tuple(
                EngineLaunch(
                    inner,
                    engine_text,
                    x=Address("x", group * c * size),
                    w=Address("w", group * filters * size),
                    y=Address("y", group * outputs * size),
                    bias=Address("bias", group * outputs * size) if problem.bias else None,
                )
                for group in range(problem.groups)
            )
        )
