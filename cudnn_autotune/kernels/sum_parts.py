"""The second launch of a gradient of weights, which adds sums of blocks."""

from __future__ import annotations

import math

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch
from cudnn_autotune.kernels.sources import ELEMENTS, source

_ARRAYS_OF_A_THREAD = 8
"""Arrays in one load of a thread."""
_MOST_PARTS = 32
_FEWEST_WARPS = 4
"""Least warps of a block."""


def sums_bytes(problem: ConvProblem, arrays: int) -> int:
    """Returns the bytes of the sums: float32, (arrays, weights)."""
    return 4 * arrays * math.prod(problem.weight_shape)


def sum_launch(problem: ConvProblem, arrays: int, most_numbers: int = 4) -> KernelLaunch:
    """Returns the launch that adds the arrays at the workspace's beginning, and writes the
    gradient.

    Args:
        most_numbers: a thread's numbers of an array: one, for few weights, or four.
    """
    weights = math.prod(problem.weight_shape)
    is_whole = weights % 4 == 0 and problem.alignment[1] >= 4 * problem.dtype.itemsize
    numbers = most_numbers if is_whole else 1
    parts = 1
    while parts < _MOST_PARTS and parts * _ARRAYS_OF_A_THREAD < arrays:
        parts *= 2
    columns = max(1, _FEWEST_WARPS // parts)
    defines: dict[str, str | int] = {
        "ELEMENT": ELEMENTS[problem.dtype],
        "NUMBERS": numbers,
        "PARTS": parts,
        "COLUMNS": columns,
    }
    return KernelLaunch(
        Kernel(source(__package__, "sum_parts.cu"), "sum_parts", tuple(defines.items())),
        grid=(-(-weights // (32 * columns * numbers)), 1, 1),
        block=(32 * parts * columns, 1, 1),
        arguments=(Address("workspace"), Address("w"), arrays, weights),
        shared_bytes=4 * numbers * 32 * parts * columns,
    )
