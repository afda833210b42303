"""Batch norms of ``convert``: on a CPU as they are on a GPU, and what computed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudnn_autotune.core.extension import _C
from cudnn_autotune.norms import choices as norm_choices
from cudnn_autotune.norms import reference
from cudnn_autotune.norms.memory import NormChoice
from cudnn_autotune.norms.reference import Operands
from support.conv.served_on_cpu import kernels_on_cpu

FORM = "two passes"


class Turns:
    """Takes the place of the turns on a GPU: what is ``fastest`` takes half as long."""

    def __init__(self) -> None:
        self.fastest, self.count = FORM, 0

    def __call__(self, programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
        self.count += 1
        return {name: 1.0 + (name != self.fastest) for name in programs}


@contextmanager
def norms_on_cpu() -> Iterator[list[str]]:
    """Within the context norms on a CPU take the way of those on a GPU.

    Yields:
        A list to which the activation of each forward is added that the operators compute.
    """
    activations: list[str] = []
    forward = reference.forward

    def recorded(given: Operands) -> list[Tensor]:
        activations.append(given.activation)
        return forward(given)

    norm_choices.forget()
    _C.set_norm_device("cpu")
    try:
        with pytest.MonkeyPatch.context() as patch, kernels_on_cpu():
            patch.setattr(reference, "forward", recorded)
            yield activations
    finally:
        _C.set_norm_device("cuda")
        norm_choices.forget()


def is_ours(output: Tensor) -> bool:
    """Whether this package's kernels have computed a tensor that has a gradient."""
    node: Any = output.grad_fn
    name = node.name()
    if "CudnnBatchNorm" in name:  # PyTorch's has a reserve space of bytes
        return bool(node._saved_result3.dtype is not torch.uint8)
    return "NormNode" in name or (
        "NativeBatchNorm" in name and _C.is_of_kernels(node._saved_result1)
    )


def choice_of(module: nn.Module) -> NormChoice:
    """The only choice for a norm."""
    (choice,) = norm_choices.choices_of(module)
    return choice


def choice_for(norm: Any, x: Tensor, activation: str = "relu") -> NormChoice:
    """The choice for a first call of a norm."""
    tensors = (x, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    assert norm_choices.choose_function(*tensors, norm.eps, activation, 0, norm, "") is not None
    return norm_choices.choices_of(norm)[-1]
