"""The ``example_input`` that a user gives to have a model run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def call_arguments(example_input: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments that ``example_input`` stands for.

    Raises:
        TypeError: it is neither a tensor, nor a tuple, nor a dict.
    """
    if isinstance(example_input, Tensor):
        return (example_input,), {}
    if isinstance(example_input, tuple):
        return example_input, {}
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    raise TypeError(
        "example_input must be a tensor, a tuple of positional arguments, or a dict of keyword "
        f"arguments, got {type(example_input).__name__}"
    )
