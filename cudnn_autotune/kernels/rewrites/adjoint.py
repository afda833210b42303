"""A forward convolution of stride 1 as the gradient of an input, and vice versa."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import (
    Address,
    EngineLaunch,
    Kernel,
    KernelLaunch,
    Recipe,
    workspace_room,
)
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.rewrites.rewrite import Form, Rewrite

_LEAST_TAPS = 16
"""Elements of a kernel from which the other direction's engines may be much faster. For few taps,
both directions have equally good engines."""
_THREADS = 256
_MOST_BLOCKS = 65535
"""The most blocks of a grid in its second dimension."""
_SOURCE = sources.source(__package__, "adjoint.cu")


class Adjoint(Rewrite):
    """A rewrite of ``fprop`` to an engine for ``dgrad``, and of ``dgrad`` to one for ``fprop``.

    With stride 1, dilation d, padding p and R taps these two are the same sum:

        y[o] = sum over r of w[r] x[o + r d - p]
        dx[i] = sum over r of w'[r] dy[i + p' - r d];
        w'[r] = w[R - 1 - r]; p' = d (R - 1) - p.

    In each group, w' has the output channels of w as its input channels. So at each call the
    filters are reversed and transposed into the workspace, and the engine takes the input as its
    output's gradient. There is no such form if the padding is larger than ``d (R - 1)``.

    For groups with long filters cuDNN's first heuristic lists no engine with tensor cores in one of
    the directions. An example is wav2vec2's positional embedding, 16 groups of 48 channels with 128
    taps, on an H100 with cuDNN 9.19. Its forward takes 16 ms in PyTorch, 0.96 ms by this rewrite,
    and 0.85 ms by an engine of a later heuristic.

    Settings are the text of the inner problem's engine. A bias is added behind it.
    """

    name = "adjoint"
    modes = ("A", "B")  # mode A lists nothing for the gradient of a long filter's input
    note = "TENSOR_CORE"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns the problem in the other direction, if the filters of groups are long."""
        (k, c_of_group, *kernel), groups = problem.weight_shape, problem.groups
        taps = math.prod(kernel)
        if (
            problem.op == "wgrad"
            or problem.dtype not in sources.ELEMENTS
            or any(s != 1 for s in problem.stride)
            or groups == 1
            or max(c_of_group, k // groups) == 1  # the package has kernels for depthwise ones
            or taps < _LEAST_TAPS
            or problem.residual
            or problem.activation
            or k // groups * taps > _MOST_BLOCKS * _THREADS
        ):
            return None
        reach = [d * (size - 1) for d, size in zip(problem.dilation, kernel, strict=True)]
        padding = tuple(reach[i % len(reach)] - p for i, p in enumerate(problem.padding))
        if min(padding) < 0:
            return None
        x, _, y = problem.alignment
        inner = replace(
            problem,
            op="dgrad" if problem.op == "fprop" else "fprop",
            input_shape=problem.output_shape,
            weight_shape=(c_of_group * groups, k // groups, *kernel),
            padding=padding,
            alignment=(y, 32, x),
            bias=False,
        )
        return Form(inner, {})

    def build(self, problem: ConvProblem, form: Form, engine_text: str) -> Recipe:
        """Returns the launches that reverse the filters, run the engine, and add a bias."""
        inner, filters = form.inner, Address("workspace")
        c, k_of_group, *kernel = inner.weight_shape
        taps = math.prod(kernel)
        launches: list[KernelLaunch | EngineLaunch] = [
            KernelLaunch(
                _kernel(problem, "reverse_filters"),
                (c, -(-k_of_group * taps // _THREADS), 1),
                (_THREADS, 1, 1),
                (filters, Address("w"), c // problem.groups, k_of_group, taps),
            ),
            EngineLaunch(inner, engine_text, x=Address("y"), w=filters, y=Address("x")),
        ]
        if problem.bias:
            channels, *size = problem.output_shape[1:]
            count = math.prod(problem.output_shape)
            launches.append(
                KernelLaunch(
                    _kernel(problem, "add_bias"),
                    (-(-count // _THREADS), 1, 1),
                    (_THREADS, 1, 1),
                    (Address("y"), Address("bias"), count, channels, math.prod(size)),
                )
            )
        room = workspace_room(math.prod(inner.weight_shape) * inner.dtype.itemsize)
        return Recipe(tuple(launches), room)


def _kernel(problem: ConvProblem, function: str) -> Kernel:
    defines: dict[str, str | int] = {
        "ELEMENT": sources.ELEMENTS[problem.dtype],
        "CHANNELS_LAST": int(problem.memory_format != torch.contiguous_format),
    }
    return Kernel(_SOURCE, function, tuple(defines.items()))
