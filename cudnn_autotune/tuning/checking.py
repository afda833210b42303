"""Compares an engine's output with a reference, on the caller's own tensors.

The reference is the convolution's definition at a sample of the output's places
(csrc/sampled_reference.h). The whole output is filled with NaN before the engine runs, and none
may be left.

Some engines are wrong: two of cuDNN 9.19's ignore that padding may differ before and after, and one
rounds float32 without a note that says so (csrc/core/errata.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.measuring import WRITTEN

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
        The numbers that :func:`error_in` reads, on the operands' device; None if there is no
        memory.
    """
    (x, w, y)[WRITTEN[problem.op]].fill_(math.nan)
    try:
        run()
        return _C.compare_output(problem.native(), [x, w, y, *added])
    except torch.OutOfMemoryError:
        return None


def error_in(found: Sequence[float]) -> float | None:
    """Returns the relative error, as :func:`relative_error`, by what :func:`comparison` found."""
    norm, error, largest, *operands = found
    if not math.isfinite(norm):
        return None
    if not math.isfinite(error) or not math.isfinite(largest):
        # Infinities are an overflow of the output's own type. NaN was left from before, unless it
        # comes from operands that no sampled place depends on.
        return math.inf if math.isnan(largest) and all(map(math.isfinite, operands)) else None
    return error / norm if norm > 0 else (0.0 if error == 0 else math.inf)
