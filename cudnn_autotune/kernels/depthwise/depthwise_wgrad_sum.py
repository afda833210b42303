"""The second launch of a depthwise weight gradient: partial sums become the gradient."""

from __future__ import annotations

import torch

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import Address, Kernel, KernelLaunch
from cudnn_autotune.kernels.depthwise.depthwise_sizes import dimensions
from cudnn_autotune.kernels.sources import ELEMENTS, source

_LANES = 32
_MOST_WARPS = 32
_SPLITS_OF_A_WARP = 8  # loads that are under way together


def partial_bytes(problem: ConvProblem, splits: int) -> int:
    """Returns the bytes of the partial sums: float32, (splits, weights)."""
    return 4 * splits * torch.Size(problem.weight_shape).numel()


def is_depthwise_wgrad(problem: ConvProblem) -> bool:
    """Returns whether it is a depthwise wgrad with a multiplier of 1, whose sizes are such that the
    kernels count rows and columns in 32 bits."""
    taps = [d * k for d, k in zip(problem.dilation, problem.weight_shape[2:], strict=True)]
    tiles = [64 * d * s for d, s in zip(problem.dilation, problem.stride, strict=True)]
    return (
        problem.op == "wgrad"
        and problem.dtype in ELEMENTS
        and 1 < problem.groups == problem.input_shape[1] == problem.weight_shape[0]
        and max(*problem.input_shape[2:], *problem.padding, *taps, *tiles) < 1 << 29
    )


def sum_launch(problem: ConvProblem, splits: int) -> KernelLaunch:
    """Returns what adds the partial sums at the workspace's beginning, and writes the gradient."""
    weights = torch.Size(problem.weight_shape).numel()
    warps = 1
    while warps < _MOST_WARPS and warps * _SPLITS_OF_A_WARP < splits:
        warps *= 2
    sizes = dimensions(problem)
    kernel = Kernel(
        source(__package__, "depthwise_wgrad_sum.cu"),
        "depthwise_wgrad_sum",
        (
            ("ELEMENT", ELEMENTS[problem.dtype]),
            ("CHANNELS_LAST", int(problem.memory_format != torch.contiguous_format)),
            ("WARPS", warps),
        ),
    )
    return KernelLaunch(
        kernel,
        grid=(-(-weights // _LANES), 1, 1),
        block=(_LANES * warps, 1, 1),
        arguments=(
            Address("workspace"),
            Address("x"),
            Address("y"),
            Address("w"),
            weights,
            splits,
            *problem.input_shape[:2],
            *(d.size for d in sizes),
            *(d.output for d in sizes),
            *(d.taps for d in sizes),
            *(d.stride for d in sizes),
            *(d.padding for d in sizes),
            *(d.dilation for d in sizes),
        ),
        shared_bytes=4 * (_LANES * warps + _LANES),
    )
