"""The second launch of a gradient of weights: sums of blocks become the gradient."""

from __future__ import annotations

import math

from cudnn_autotune.engines.kernels.sources import ELEMENTS, source
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch

_ARRAYS_OF_A_WARP = 8
"""A warp adds few, because it waits for each four of them."""
_MOST_WARPS = 32


def sums_bytes(problem: ConvProblem, arrays: int) -> int:
    """Bytes of the sums: float32, (arrays, weights)."""
    return 4 * arrays * math.prod(problem.weight_shape)


def sum_launch(problem: ConvProblem, arrays: int) -> KernelLaunch:
    """Returns what adds the arrays at the workspace's beginning, and writes the gradient."""
    weights = math.prod(problem.weight_shape)
    warps = 1
    while warps < _MOST_WARPS and warps * _ARRAYS_OF_A_WARP < arrays:
        warps *= 2
    defines: dict[str, str | int] = {"ELEMENT": ELEMENTS[problem.dtype], "WARPS": warps}
    return KernelLaunch(
        Kernel(source("sum_parts.cu"), "sum_parts", tuple(defines.items())),
        grid=(-(-weights // 32), 1, 1),
        block=(32 * warps, 1, 1),
        arguments=(Address("workspace"), Address("w"), arrays, weights),
        shared_bytes=4 * 32 * warps,
    )
