"""Compares an engine's output with a reference, on the caller's own tensors.

The reference is the convolution's definition at a sample of the output's places
(csrc/sampled_reference.h), which each check draws anew. The whole output is filled with NaN before
the engine runs, and none may be left. On operands such as zeros a right output cannot be told from
a wrong one.

Some engines are wrong: two of cuDNN 9.19's ignore that padding may differ before and after, and one
rounds float32 without a note that says so (csrc/core/errata.cpp).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.measuring import WRITTEN, terms

# One place or channel of a right output may be off by three times as much as the whole: it has few
# numbers, which may nearly cancel.
_LOCAL_SHARE = 1 / 3
# So many of the places and channels that the operands reach must have another reference than zero.
_LEAST_SHARE = 0.25
# The least share of an operand's numbers that must not be zero. An operand with fewer is not timed
# on either: it draws less power than the next ones will.
_LEAST_FILLED = 0.01

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


def is_right(problem: ConvProblem, error: float | None) -> bool:
    """Returns whether an output was compared with a reference, with this relative error, and is
    right."""
    return error is not None and error <= tolerance(problem)


def tolerance(problem: ConvProblem) -> float:
    """The largest relative error of a right engine."""
    if problem.may_use_tf32:
        return TOLERANCE_TF32
    return TOLERANCES[problem.dtype]


def new_seed() -> int:
    """A seed for the places of one check. It is the system's, and no generator of a user's is
    asked."""
    return int.from_bytes(os.urandom(4), "little")


def relative_error(
    problem: ConvProblem,
    run: Callable[[], None],
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *added: Tensor,
    seed: int | None = None,
) -> float | None:
    """Fills the output with NaN, calls ``run``, and compares the output with the reference.

    Args:
        problem: the problem that the tensors belong to.
        run: computes ``problem`` on ``x``, ``w`` and ``y``, writing one of them.
        x, w, y: the forward's input, weight and output, on any device.
        added: the bias and the residual of a fused problem that has them.
        seed: draws the places that are compared; None stands for a new one.

    Returns:
        ``|output - reference| / |reference|``, or a third of the largest such ratio of one place
        with its channels, or of one channel, if that is more; infinity where the output has NaN or
        infinities that it cannot have. None where nothing can be told: an operand is zero or not
        finite, the reference is nearly all zero, the output overflows its type, or there is no
        memory for the workspace or the reference. An output that is wrong all the same has its
        error, which is above :func:`tolerance`.
    """
    found = comparison(problem, run, x, w, y, *added, seed=new_seed() if seed is None else seed)
    return None if found is None else error_in(problem, found)


def comparison(
    problem: ConvProblem,
    run: Callable[[], None],
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *added: Tensor,
    seed: int,
) -> Tensor | None:
    """Begins what :func:`relative_error` does, and does not wait for the device.

    Returns:
        The numbers that :func:`error_in` reads, on the operands' device; None if there is no
        memory.
    """
    (x, w, y)[WRITTEN[problem.op]].fill_(math.nan)
    try:
        run()
        return _C.compare_output(problem.native(), [x, w, y, *added], seed)
    except torch.OutOfMemoryError:
        return None


def error_in(problem: ConvProblem, found: Tensor) -> float | None:
    """Returns the relative error, as :func:`relative_error`, by what :func:`comparison` found."""
    norm, error, local, filled, (largest, *operands) = _C.read_comparison(found.cpu())
    if not all(map(math.isfinite, (norm, *operands))):
        return None
    if math.isnan(largest) or (math.isinf(largest) and not _may_overflow(problem, operands)):
        return math.inf
    if norm == 0:
        return math.inf if error > 0 else (0.0 if filled else None)
    relative = max(error / norm, _LOCAL_SHARE * local)
    is_wrong = relative > tolerance(problem)
    is_told = filled >= _LEAST_SHARE and 0 not in operands and math.isfinite(largest)
    return relative if is_wrong or is_told else None


def _may_overflow(problem: ConvProblem, operands: Sequence[float]) -> bool:
    """Whether right outputs may be infinite, by the largest magnitude in each operand."""
    a, b, *added = operands
    largest: float = torch.finfo(problem.dtype).max
    return a * b * terms(problem) + sum(added) >= 0.9 * largest


def is_telling(problem: ConvProblem, tensors: Sequence[Tensor]) -> bool:
    """Whether a right output can be told from a wrong one on these operands, as far as a look at
    each of them shows: they are finite, and not nearly all zero. Waits for the device.

    Args:
        problem, tensors: as for :func:`relative_error`.
    """
    norm = torch.linalg.vector_norm
    found = []
    for place, tensor in enumerate(tensors):
        if place != WRITTEN[problem.op]:
            # The number of others than zero does not fit into 16 bits.
            counted = torch.float32 if tensor.itemsize < 4 else tensor.dtype
            found += [norm(tensor, math.inf).double(), norm(tensor, 0, dtype=counted).double()]
    numbers: list[float] = torch.stack(found).tolist()
    read = (tensor for place, tensor in enumerate(tensors) if place != WRITTEN[problem.op])
    return all(
        math.isfinite(largest) and count >= max(1, _LEAST_FILLED * tensor.numel())
        for tensor, largest, count in zip(read, numbers[::2], numbers[1::2], strict=True)
    )
