"""Lets CPU tensors take the way of CUDA tensors, down to the operators' CPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn_autotune.nn import functional


def serve_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and functions call the operators for tensors on a CPU, where ATen computes them."""

    def is_served(dims: int, input: Any, weight: Any, bias: Any) -> bool:
        tensors = [input, weight] if bias is None else [input, weight, bias]
        return (
            not functional._is_exported()
            and all(isinstance(tensor, torch.Tensor) for tensor in tensors)
            and input.dtype in functional.DTYPES
            and weight.dim() == dims + 2
            and not any(functional._has_rules_of_its_own(tensor) for tensor in tensors)
        )

    monkeypatch.setattr(functional, "_is_served", is_served)
