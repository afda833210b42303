"""Depthwise convolutions of one dimension with few taps, and their gradients of the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Kernel, KernelLaunch, Recipe
from cudnn_autotune.kernels import sources
from cudnn_autotune.kernels.depthwise.depthwise_sizes import PlanarLayer
from cudnn_autotune.kernels.family import KernelFamily, addends, operands

_VECTOR_BYTES = 16
_MOST_TAPS = 9
"""Taps above which ``depthwise_mma`` computes 16-bit types."""


@dataclass(frozen=True)
class _Tiling:
    """The outputs of a block."""

    threads: int

    @property
    def settings(self) -> str:
        return f"THREADS={self.threads}"


class Depthwise1d(KernelFamily[_Tiling]):
    """Depthwise convolutions of contiguous 1-d tensors with 2 to 9 taps, such as Mamba's causal
    ones. Multiplier, stride and dilation are 1. It has fprop with every epilogue, and dgrad, in
    float16, bfloat16 and float32.

    An output is NaN or infinite only because of its own operands.
    """

    name = "depthwise_1d"
    version = sources.version_of(__name__)
    min_capability = (0, 0)
    numerical_notes = ()

    def tilings(self, problem: ConvProblem, gpu: Gpu) -> Sequence[_Tiling]:
        return (_Tiling(256), _Tiling(128)) if _is_computed(problem) else ()

    def build(self, problem: ConvProblem, tiling: _Tiling, gpu: Gpu) -> Recipe:
        layer = PlanarLayer.of(problem)
        rows, out_length = layer.images * layer.channels, layer.out_size[1]
        vectors = -(-rows * out_length * problem.dtype.itemsize // _VECTOR_BYTES)
        defines: dict[str, str | int] = {
            "ELEMENT": sources.ELEMENTS[problem.dtype],
            "TAPS": layer.kernel[1],
            "TURNED": int(problem.op == "dgrad"),
            "THREADS": tiling.threads,
            **dict(sources.activation_macros(problem.activation)),
        }
        launch = KernelLaunch(
            Kernel(
                sources.source(__package__, "depthwise_1d.cu"),
                "depthwise_1d",
                tuple(defines.items()),
            ),
            grid=(-(-vectors // tiling.threads), 1, 1),
            block=(tiling.threads, 1, 1),
            arguments=(
                *operands(problem),
                *addends(problem),
                *(layer.channels, rows, layer.in_size[1], out_length, layer.padding[1]),
            ),
        )
        return Recipe((launch,))


def _is_computed(problem: ConvProblem) -> bool:
    channels = problem.input_shape[1]
    sizes = (math.prod(problem.input_shape), math.prod(problem.output_shape))
    return (
        problem.op != "wgrad"
        and problem.spatial_dims == 1
        and problem.memory_format == torch.contiguous_format
        and problem.dtype in sources.ELEMENTS
        and 1 < problem.groups == channels == problem.weight_shape[0]
        and problem.stride == problem.dilation == (1,)
        and 2 <= problem.weight_shape[2] <= _MOST_TAPS
        and min(problem.alignment[0], problem.alignment[2]) >= _VECTOR_BYTES
        and max(sizes) + max(problem.padding) < 2**31 - 256 * _VECTOR_BYTES
    )
