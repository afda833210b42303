"""Batch norms of ``convert``: on a CPU as they are on a GPU, and what computed them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor, nn

from cudnn_autotune.core.extension import _C
from cudnn_autotune.norms import choices as norm_choices
from cudnn_autotune.norms import reference
from cudnn_autotune.norms.memory import NormChoice
from cudnn_autotune.norms.reference import Operands


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "forward", recorded)
            yield activations
    finally:
        _C.set_norm_device("cuda")
        norm_choices.forget()


def is_ours(output: Tensor) -> bool:
    """Whether this package's operators have computed a tensor that has a gradient."""
    return "NormNode" in output.grad_fn.name()


def choice_of(module: nn.Module) -> NormChoice:
    """The only choice for a norm."""
    (choice,) = norm_choices.choices_of(module)
    return choice
