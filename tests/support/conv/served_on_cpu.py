"""Lets CPU tensors take the way of CUDA tensors, down to the operators' CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from cudnn_autotune import _C, functional


@contextmanager
def served_on_cpu() -> Iterator[None]:
    """Calls with a policy are served by the operators for tensors on a CPU, where ATen computes
    them, and marked for a compiler."""

    def is_served(dims: int, input: Any, weight: Any, bias: Any) -> bool:
        tensors = [input, weight] if bias is None else [input, weight, bias]
        return (
            all(isinstance(tensor, torch.Tensor) for tensor in tensors)
            and input.dtype in functional.DTYPES
            and weight.dim() == dims + 2
            and not any(functional._has_rules_of_its_own(tensor) for tensor in tensors)
        )

    with kernels_on_cpu(), mock.patch.object(functional, "_is_served", is_served):
        yield


_kernels: list[Any] = []
"""The kernels of the outermost context; empty outside of all."""


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """ATen's operators have the kernels that read the policy, for tensors on a CPU. Contexts may be
    nested."""
    if _kernels:
        yield
        return
    _kernels.append(_C.AtenKernels("CPU"))
    try:
        yield
    finally:
        _kernels.clear()
        # PyTorch's dispatcher in Python, which export uses, would still look for them.
        names = ["convolution", "native_batch_norm", "native_group_norm"]
        for name in (*names, "convolution_backward", "native_batch_norm_backward"):
            getattr(torch.ops.aten, name).default._dispatch_cache.clear()
