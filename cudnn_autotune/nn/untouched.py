"""One run of a user's model, after which all that it changed is restored."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy


def run_once(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Runs the model's forward, and the backward of its summed outputs if they have one.

    Afterwards all is as it was: see :func:`untouched`. The model's hooks run, except a
    DistributedDataParallel's, which average gradients.

    Raises:
        ValueError: the model has lazy parameters that no call has given a shape.
        RuntimeError: PyTorch's, for ``torch.utils.checkpoint`` with ``use_reentrant=True``.
        Exception: the model's.
    """
    with untouched(model, inputs, kwargs):
        step(model, inputs, kwargs)


def check_initialized(model: nn.Module) -> None:
    """Raises ValueError if the model has lazy parameters that no call has given a shape."""
    if any(is_lazy(entry) for entry in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "model must have been called once: it has lazy parameters, which get their shapes (and "
            "their random values) in the first call"
        )


@contextmanager
def untouched(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Restores all changes of the model's runs in the ``with`` block.

    These are buffers (the statistics of a BatchNorm), the contents of the tensors in ``inputs`` and
    ``kwargs``, and random number generators (PyTorch's, Python's and NumPy's).

    Raises:
        ValueError: the model has lazy parameters that no call has given a shape.
    """
    check_initialized(model)
    given = tensors_in((inputs, kwargs))
    with (
        generators_kept(cuda_devices([*model.parameters(), *model.buffers(), *given])),
        _buffers_kept(model),
        _contents_kept(given),
        _gradients_not_averaged(model),
    ):
        yield


def step(model: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Runs the forward, and the backward of the summed outputs if they have one.

    Gradients are computed, and not added to any ``.grad``.
    """
    given = tensors_in((inputs, kwargs))
    outputs = [t for t in tensors_in(model(*inputs, **kwargs)) if t.grad_fn is not None]
    leaves = _leaves(outputs, given) if torch.is_grad_enabled() else []
    if leaves:
        # `backward()` would add to `.grad`, and run the hooks that average gradients over ranks or
        # update parameters. The gradient of a sum is ones, with strides of 0; these ones have the
        # outputs' own layout.
        ones = [torch.ones_like(output) for output in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in any nest of containers and objects, each once."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # it holds the entries, so that no id is used again
    left = [value]
    while left:
        entry = left.pop()
        if id(entry) in seen:
            continue
        seen[id(entry)] = entry
        if isinstance(entry, Tensor):
            found.append(entry)
        elif isinstance(entry, Mapping):
            left += reversed(list(entry.values()))
        elif isinstance(entry, (list, tuple, set, frozenset)):
            left += reversed(list(entry))
        elif isinstance(entry, (nn.Module, ModuleType, type)) or callable(entry):
            continue
        elif is_dataclass(entry):
            left += reversed([getattr(entry, field.name) for field in fields(entry)])
        elif hasattr(entry, "__dict__"):
            left += reversed(list(vars(entry).values()))
    return found


def _leaves(outputs: Iterable[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Returns the leaves that a backward from ``outputs`` reaches: given tensors and parameters.

    The parameters are the forward's. FSDP may have replaced them since.
    """
    ends = {tensor.grad_fn for tensor in given}  # behind a given tensor is the user's own graph
    leaves = {id(tensor): tensor for tensor in given if tensor.requires_grad}
    seen: set[Any] = set()
    left: list[Any] = [output.grad_fn for output in outputs]
    while left:
        node = left.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        left += [next_node for next_node, _ in node.next_functions]
    return list(leaves.values())


@contextmanager
def generators_kept(devices: Iterable[int]) -> Iterator[None]:
    """Restores the generators of PyTorch (CPU and these CUDA devices), of Python and of NumPy.

    Other threads may use other devices' generators, so this package never does.
    """
    python, numpy = random.getstate(), sys.modules.get("numpy.random")
    state = None if numpy is None else numpy.get_state(legacy=False)
    with torch.random.fork_rng(sorted(set(devices))):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(state)


def seed_generators(devices: Iterable[int], seed: int) -> None:
    """Seeds the generators of the CPU and of these CUDA devices.

    ``torch.manual_seed`` would seed all devices' generators.
    """
    torch.default_generator.manual_seed(seed)
    for device in set(devices):
        torch.cuda.default_generators[device].manual_seed(seed)


def cuda_devices(values: Iterable[Any]) -> set[int]:
    """Returns the indices of the CUDA devices that the tensors among ``values`` are on."""
    tensors = (value for value in values if isinstance(value, Tensor) and value.is_cuda)
    return {tensor.device.index for tensor in tensors}


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restores buffers, also if the forward replaces or adds some."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    with _contents_kept(list(model.buffers())):
        try:
            yield
        finally:
            for table, before in tables:
                if isinstance(table, dict):
                    table.clear()
                for name, buffer in before.items():  # all that a scripted module's table has
                    table[name] = buffer


@contextmanager
def _contents_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restores the contents of the dense tensors among these."""
    dense = [
        t
        for t in tensors
        if t.layout == torch.strided and not (t.is_nested or t.is_meta or t.is_quantized)
    ]
    copies = [(tensor, tensor.detach().clone()) for tensor in dense]
    try:
        yield
    finally:
        for tensor, copy in copies:
            # Any write, even of the same values, would spoil a graph of the user's that has yet to
            # run backward. The tensor's version shows no change, since a BatchNorm does not raise
            # it.
            if not torch.equal(_bits(tensor), _bits(copy)):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(copy)


def _bits(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes, for comparisons that include NaN."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.reshape(-1).contiguous().view(torch.uint8)


@contextmanager
def _gradients_not_averaged(model: nn.Module) -> Iterator[None]:
    """Makes each DistributedDataParallel in the model call only its module.

    Its own forward prepares for hooks on gradients, which never run here. With ``static_graph`` it
    learns its hooks from the first backward: without them it would never average a gradient.
    """
    replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    before = [replica.__dict__.get("forward") for replica in replicas]
    try:
        for replica in replicas:
            replica.__dict__["forward"] = replica.module.__call__
        yield
    finally:
        for replica, own in zip(replicas, before, strict=True):
            del replica.__dict__["forward"]
            if own is not None:
                replica.__dict__["forward"] = own
