"""The problems that a model's convolutions have on given inputs, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cudnn_autotune.choice_log import choices, discard
from cudnn_autotune.modules import Conv2d
from cudnn_autotune.problem import ConvProblem
from cudnn_autotune.settings import use_sampling
from cudnn_autotune.untouched import run_once

_MODE = "heuristic"
# Choices are made, and noted, at the first call under a policy. So each run gets a policy of its
# own: a limit on the candidates to time, of which this mode times none.
_limits = itertools.count(2**31 - 1, -1)


@dataclass(frozen=True)
class Found:
    problems: tuple[ConvProblem, ...]
    device: int
    """Index of the CUDA device that all of them run on."""


def problems_of(model: nn.Module, *inputs: Any, **kwargs: Any) -> list[ConvProblem]:
    """What ``model(*inputs, **kwargs)`` asks of this package, each problem once, in order.

    The model runs once, with cuDNN's heuristics: forward, and backward from the sum of its outputs,
    unless gradients are off (``torch.no_grad()``) or nothing asks for them. It is in the state
    (training, autocast, ...) that the caller has put it in; its gradients, buffers and the random
    number generators are as before afterwards.

    Returns:
        Without those for which an engine is pinned: there is nothing to tune.

    Raises:
        ValueError: there are none, they are spread over several devices, or the model has lazy
            parameters. Whatever the model raises.
    """
    return list(find(model, inputs, kwargs).problems)


def find(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
    """:func:`problems_of`, and where they run."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # its own forward prepares for gradients to be averaged
    limit = next(_limits)
    with _modes_of_layers_set_aside(model), use_sampling(_MODE, benchmark_limit=limit):
        run_once(model, inputs, kwargs)
    made = [c for c in choices() if c.sampling == _MODE and c.benchmark_limit == limit]
    discard(made)
    if not made:
        raise ValueError(
            "model must have a convolution that cudnn_autotune serves with these inputs, and all "
            "were served by PyTorch: are both on a CUDA device, and the layers "
            "cudnn_autotune.Conv2d? (cudnn_autotune.fallbacks() counts reasons)"
        )
    devices = {choice.device for choice in made}
    if len(devices) > 1:
        raise ValueError(f"model must be on one CUDA device, and runs on {sorted(devices)}")
    problems = dict.fromkeys(choice.problem for choice in made if choice.origin != "pinned")
    return Found(tuple(problems), devices.pop())


@contextmanager
def _modes_of_layers_set_aside(model: nn.Module) -> Iterator[None]:
    """A layer with a mode of its own would tune at once."""
    own = [(m, m.sampling) for m in model.modules() if isinstance(m, Conv2d) and m.sampling]
    try:
        for layer, _ in own:
            layer.sampling = None
        yield
    finally:
        for layer, mode in own:
            layer.sampling = mode
