"""Running a user's model once without leaving a trace in it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def run_once(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The model's forward, and the backward of its summed outputs if they have one.

    Afterwards gradients, buffers (the statistics of a BatchNorm) and random number generators
    (PyTorch's and Python's) are what they were. Hooks that are registered on the model run.

    Raises:
        ValueError: lazy parameters that no call has given a shape. What the model raises;
        RuntimeError by PyTorch for ``torch.utils.checkpoint`` with ``use_reentrant=True``.
    """
    if any(is_lazy(entry) for entry in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "model must have been called once: it has lazy parameters, which get their shapes (and "
            "their random values) in the first call"
        )
    given = list(_tensors((inputs, kwargs)))
    everything = [*model.parameters(), *model.buffers(), *given]
    devices = {tensor.device.index for tensor in everything if tensor.is_cuda}
    with generators_kept(devices), _buffers_kept(model):
        outputs = [t for t in _tensors(model(*inputs, **kwargs)) if t.requires_grad]
        leaves = [t for t in (*model.parameters(), *given) if t.requires_grad]
        if torch.is_grad_enabled() and outputs and leaves:
            # Not `backward()`: it adds to what is in `.grad`, and runs the hooks with which
            # gradients are averaged over ranks, or parameters updated. Ones in the outputs' own
            # layout are what a sum's gradient is, but for its strides of 0.
            ones = [torch.ones_like(output) for output in outputs]
            torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those in ``value``, which may be any nest of containers and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for entry in value:
            yield from _tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


@contextmanager
def generators_kept(devices: Iterable[int]) -> Iterator[None]:
    """PyTorch's random numbers, of the CPU and of these CUDA devices, and Python's."""
    python = random.getstate()
    with torch.random.fork_rng(sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Also where the forward puts other tensors in their place, or adds some."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    copies = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        with torch.no_grad():
            for buffer, copy in copies.items():
                # A write, even of the same values, would spoil a graph of the user's that has yet
                # to be run backward.
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
