"""The problems of a model's convolutions on given inputs, forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.nn.modules import WithPolicy, check_model
from cudnn_autotune.nn.untouched import run_once
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.probing import probe

NOTHING_SERVED = (
    "model must have a convolution that cudnn_autotune serves with these inputs, and all were "
    "served by PyTorch: are both on a CUDA device, and the layers converted? "
    "(cudnn_autotune.fallbacks() counts reasons)"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    counts: Mapping[ConvProblem, int]
    """Number of calls of each problem by the model, in the order of the first calls."""
    device: int | None
    """Index of their CUDA device; None if this package serves none."""
    calls: tuple[Choice, ...] = ()
    """The heuristics' choices that served the run, with the policies of the calls."""
    by_layout: tuple[Mapping[ConvProblem, int], ...] = ()
    """Numbers of calls in each tried layout of the model; empty if there was one."""


def problems_of(model: nn.Module, *inputs: Any, **kwargs: Any) -> list[ConvProblem]:
    """Returns the problems of ``model(*inputs, **kwargs)``, each once, in order.

    The model runs once, with cuDNN's heuristics: forward, and backward from the sum of its outputs,
    unless gradients are off (``torch.no_grad()``) or no tensor requires them. It runs in the
    caller's state (training, autocast, ...). Afterwards its gradients and buffers, the inputs and
    the random number generators are as before. ``on_decision`` handlers are not called. Calls of
    other threads are not counted, and are tuned as usual.

    Returns:
        The problems, without pinned ones, which need no tuning.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: there are no problems, they are on several devices, or the model has lazy
            parameters.
        Exception: the model's.
    """
    return list(calls_of(model, *inputs, **kwargs))


def calls_of(model: nn.Module, *inputs: Any, **kwargs: Any) -> Mapping[ConvProblem, int]:
    """Returns the problems of :func:`problems_of`, with the number of the model's calls of each."""
    found = find(model, inputs, kwargs)
    if found.device is None:
        raise ValueError(NOTHING_SERVED)
    return found.counts


def find(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
    """Returns the problems of :func:`problems_of`, with the device; there may be none."""
    check_model(model)
    # This precedes the run, because FSDP replaces parameters in it.
    learns = torch.is_grad_enabled() and any(_has_trained_weights(m) for m in model.modules())
    with probe() as probed:
        run_once(model, inputs, kwargs)
    made = probed.choices
    if not made:
        return Found({}, None)
    if learns and not any(choice.problem.op == "wgrad" for choice in made):
        _log.warning(
            "the model's weights require gradients, and its backward asked for none: is there a "
            "tensor with a gradient in what it returns? Its backward is tuned when it first runs"
        )
    devices = {choice.device for choice in made}
    if len(devices) > 1:
        raise ValueError(f"model must be on one CUDA device, and runs on {sorted(devices)}")
    problems = dict.fromkeys(choice.problem for choice in made if choice.origin != "pinned")
    counts = {problem: probed.calls_of(problem) for problem in problems}
    return Found(counts, devices.pop(), tuple(made))


def _has_trained_weights(module: nn.Module) -> bool:
    """Returns whether this package serves the module, and its weight requires a gradient."""
    return isinstance(module, WithPolicy) and any(
        # The weight of a parametrized module is one of a module below it.
        parameter.requires_grad
        for name, parameter in module.named_parameters()
        if name != "bias"
    )
