"""The table of tolerances: the largest relative errors (Frobenius) of right outputs, by dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """The tolerances for outputs of one dtype."""

    kernel: float
    """Largest error of a convolution's engine. In tests/gpu/test_every_candidate.py right engines
    stay below a fifth of it, and wrong ones have errors of 1e-1 and more, or the rounding error of
    a narrower type."""
    norm: float
    """Error of a norm's kernel to PyTorch's functions that is always allowed."""
    program: float
    """Difference of two programs that is always allowed; for float32, TF32's."""
    step: float
    """Rounding step of the computation; for float32, TF32's."""


TOLERANCES = {
    torch.float64: Tolerance(kernel=1e-10, norm=1e-10, program=1e-9, step=2.0**-52),
    torch.float32: Tolerance(kernel=1e-4, norm=3e-5, program=1e-2, step=2.0**-10),
    torch.float16: Tolerance(kernel=2e-2, norm=6e-3, program=2e-2, step=2.0**-10),
    torch.bfloat16: Tolerance(kernel=5e-2, norm=3e-2, program=1e-1, step=2.0**-7),
}
KERNEL_TF32 = 1e-2
"""Largest error of an engine that computes float32 in TF32."""
