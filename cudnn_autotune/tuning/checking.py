"""Compares an engine's output with a reference, on the caller's own tensors.

The reference is the convolution's definition at a sample of the output's places
(``tuning.sampled_reference``). The whole output is filled with NaN before the engine runs, and none
may be left.

Some engines are wrong: two of cuDNN 9.19's ignore that padding may differ before and after, and one
rounds float32 without a note that says so (csrc/core/errata.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.measuring import WRITTEN
from cudnn_autotune.tuning.sampled_reference import sampled

# Relative errors (Frobenius norm) above which an engine is wrong. In
# tests/gpu/test_every_candidate.py right engines stay below a fifth of these, and wrong ones have
# errors of 1e-1 and more, or the rounding error of a narrower type.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
TOLERANCE_TF32 = 1e-2

COMPARED = 5
"""How many numbers :func:`comparison` returns."""


def tolerance(problem: ConvProblem) -> float:
    """The largest relative error of a right engine."""
    if problem.may_use_tf32:
        return TOLERANCE_TF32
    return TOLERANCES[problem.dtype]


def relative_error(
    problem: ConvProblem,
    run: Callable[[], None],
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *added: Tensor,
) -> float | None:
    """Fills the output with NaN, calls ``run``, and compares the output with the reference.

    Args:
        problem: the problem that the tensors belong to.
        run: computes ``problem`` on ``x``, ``w`` and ``y``, writing one of them.
        x, w, y: the forward's input, weight and output, on any device.
        added: the bias and the residual of a fused problem that has them.

    Returns:
        ``|output - reference| / |reference|``, infinity where the output has NaN that the
        reference has not. None where they cannot be compared: the operands are not finite, or
        there is no memory for the workspace or the reference.
    """
    found = comparison(problem, run, x, w, y, *added)
    return None if found is None else error_in(found.tolist())


def comparison(
    problem: ConvProblem,
    run: Callable[[], None],
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *added: Tensor,
) -> Tensor | None:
    """Begins what :func:`relative_error` does, and does not wait for the device.

    Returns:
        The ``COMPARED`` numbers that :func:`error_in` reads, on the operands' device; None if there
        is no memory.
    """
    output = (x, w, y)[WRITTEN[problem.op]]
    output.fill_(math.nan)
    try:
        run()
        compared, reference = sampled(problem, x, w, y, *added)
        difference = compared.to(reference.dtype) - reference
        difference = softshrink(difference, _least_number(output.dtype))
        both = torch.stack((reference, difference)).flatten(1)
        # In float32 the squares of small numbers would be zero, and of large ones infinite.
        norms = torch.linalg.vector_norm(both, dim=1, dtype=torch.float64)
        # Finite numbers of any dtype but float64 have a finite sum in it.
        read = [one.sum(dtype=torch.float64) for one in (x, w, y, *added) if one is not output]
        return torch.cat((norms, _extremes(output), torch.stack(read).sum(0, keepdim=True)))
    except torch.OutOfMemoryError:
        return None


def error_in(found: Sequence[float]) -> float | None:
    """Returns the relative error, as :func:`relative_error`, by what :func:`comparison` found."""
    norm, error, least, most, operands = found
    if not math.isfinite(norm):
        return None
    if not all(map(math.isfinite, (error, least, most))):
        # Infinities are an overflow of the output's own type. NaN was left from before, unless it
        # comes from operands that no sampled place depends on.
        return math.inf if math.isnan(least) and math.isfinite(operands) else None
    return error / norm if norm > 0 else (0.0 if error == 0 else math.inf)


def _least_number(dtype: torch.dtype) -> float:
    """The least positive number of a type. Numbers near it lie so far apart, and right outputs are
    off by as much: gradients in float16 without a loss scale are so small."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def _extremes(tensor: Tensor) -> Tensor:
    """The least and the largest number of a tensor, in float64; NaN, both, if it has one."""
    # In the order of its memory: torch copies a tensor that is not contiguous first.
    order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    return torch.stack(tensor.permute(order).aminmax()).double()
