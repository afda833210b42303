"""Is a chosen engine right? Its output against a reference, on the caller's own tensors.

The reference is ATen's convolution without cuDNN, in float32 (float64 for float64) and without
TF32. Engines do go wrong: of cuDNN 9.19's, two ignore that padding may differ before and after,
and one rounds float32 without saying so (csrc/core/errata.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_autotune._extension import _C
from cudnn_autotune.problem import ConvProblem

# Relative errors (Frobenius norm) above which an engine is wrong. Right ones stay below a fifth of
# these in tests/gpu/test_every_candidate.py; wrong ones are off by 1e-1 and more, or by the
# rounding of a narrower type.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
TOLERANCE_TF32 = 1e-2

# Samples of the batch that are compared; wgrad sums over all of them.
_SAMPLES = 4


def tolerance(problem: ConvProblem) -> float:
    """The largest relative error of a right engine."""
    if problem.dtype == torch.float32 and problem.allow_tf32:
        return TOLERANCE_TF32
    return TOLERANCES[problem.dtype]


def relative_error(
    problem: ConvProblem, plan: _C.Plan, x: Tensor, w: Tensor, y: Tensor
) -> float | None:
    """Runs ``plan`` over an output of NaN, and compares.

    Args:
        problem, plan: of one another.
        x, w, y: as ``tuning.choose``; the one that the plan writes is overwritten.

    Returns:
        ``|output - reference| / |reference|`` (infinity where the output has NaN that the
        reference has not); None where nothing can be said: operands that are not finite, or no
        memory for the engine's workspace or the reference.
    """
    output = {"fprop": y, "dgrad": x, "wgrad": w}[problem.op]
    output.fill_(math.nan)
    try:
        _C.execute(plan, x, w, y)
        samples = _some_samples(problem, x.shape[0], x.device)
        reference = _reference(problem, x, w, y, samples)
    except torch.OutOfMemoryError:
        return None
    compared = output if samples is None else output[samples]
    norm = reference.norm()
    error = (compared.to(reference.dtype) - reference).norm()
    found_norm, found_error, whole = torch.stack(
        [norm.double(), error.double(), output.isfinite().all().double()]
    ).tolist()
    if not math.isfinite(found_norm):
        return None
    if not math.isfinite(found_error) or not whole:
        # An overflow of the output's own type is the caller's; NaN left from before is not.
        return math.inf if bool(output.isnan().any()) else None
    return found_error / found_norm if found_norm > 0 else (0.0 if found_error == 0 else math.inf)


def _some_samples(problem: ConvProblem, batch: int, device: torch.device) -> Tensor | None:
    """Evenly spread, first and last among them; None: all."""
    if problem.op == "wgrad" or batch <= _SAMPLES:
        return None
    return torch.linspace(0, batch - 1, _SAMPLES, device=device).long()


def _reference(
    problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, samples: Tensor | None
) -> Tensor:
    wide = _wide_type(problem)

    def operand(tensor: Tensor) -> Tensor:
        chosen = tensor if samples is None or tensor is w else tensor[samples]
        return chosen.to(wide, memory_format=torch.contiguous_format)

    n = problem.spatial_dims
    pre, post = problem.padding[:n], problem.padding[n:]
    zeros = [0] * n
    # Last dimension first, as torch.nn.functional.pad takes it.
    around = [p for d in reversed(range(n)) for p in (pre[d], post[d])]
    if problem.op == "fprop":
        padded = torch.nn.functional.pad(operand(x), around)
        return _convolution(
            padded, operand(w), problem.stride, problem.dilation, False, zeros, problem.groups
        )
    if problem.op == "dgrad":
        # The gradient of the padded input is a transposed convolution; what the stride never
        # reached at its end is output padding.
        reached = [
            (y.shape[2 + d] - 1) * problem.stride[d]
            + problem.dilation[d] * (w.shape[2 + d] - 1)
            + 1
            for d in range(n)
        ]
        rest = [x.shape[2 + d] + pre[d] + post[d] - reached[d] for d in range(n)]
        padded = _convolution(
            operand(y), operand(w), problem.stride, problem.dilation, True, rest, problem.groups
        )
        return torch.nn.functional.pad(padded, [-p for p in around])
    # The weight's gradient is a convolution of the input by the output's gradient with batch and
    # channels exchanged, stride and dilation too.
    padded = torch.nn.functional.pad(operand(x), around)
    grads = []
    for xg, yg in zip(
        padded.chunk(problem.groups, 1), operand(y).chunk(problem.groups, 1), strict=True
    ):
        grad = _convolution(
            xg.transpose(0, 1), yg.transpose(0, 1), problem.dilation, problem.stride, False, zeros
        )
        for d in range(n):
            grad = grad.narrow(2 + d, 0, w.shape[2 + d])
        grads.append(grad.transpose(0, 1))
    return torch.cat(grads)


def _wide_type(problem: ConvProblem) -> torch.dtype:
    if problem.dtype == torch.float64:
        return torch.float64
    # ATen's own convolutions are matrix products, and round to TF32 where those may.
    rounds = torch.backends.cuda.matmul.allow_tf32
    is_exact = problem.dtype == torch.float32 and not problem.allow_tf32
    return torch.float64 if rounds and is_exact else torch.float32


def _convolution(
    a: Tensor,
    b: Tensor,
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """ATen's, with cuDNN switched off for this one call."""
    no_padding = [0] * len(stride)
    flags = {"benchmark": False, "deterministic": False, "cudnn_enabled": False}
    return torch.ops.aten._convolution(
        a.contiguous(),
        b.contiguous(),
        None,
        stride,
        no_padding,
        dilation,
        transposed,
        output_padding,
        groups,
        **flags,
        allow_tf32=False,
    )
