"""Norms in checkpoints: whatever changes between a forward and its recomputation, both save what
PyTorch's functions save. On a CPU that takes the way of a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.conv.served_on_cpu import served_on_cpu
from support.norms.models import NormAct, conv, data
from support.norms.served import norms_on_cpu
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cudnn_autotune as ca
from cudnn_autotune.norms import measuring as norm_measuring
from cudnn_autotune.norms import memory as norm_memory
from cudnn_autotune.norms.plan import FORMS


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def global_hook() -> Iterator[None]:
    handle = register_module_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def another_measures() -> Iterator[None]:
    """Another thread measures a norm."""
    assert norm_memory._measuring.acquire_now()
    try:
        yield
    finally:
        norm_memory._measuring.release()


@contextmanager
def forgotten() -> Iterator[None]:
    yield
    ca.forget()


@contextmanager
def disabled() -> Iterator[None]:
    """The process's policy is over when the recomputation comes."""
    with ca.enable():
        yield


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "flops": lambda: FlopCounterMode(display=False),
    "functions": Functions,
    "operators": Operators,
    "global hook": global_hook,
    "another thread": another_measures,
    "forgotten": forgotten,
    "enabled": disabled,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("cpu"),
    "hooks": lambda: saved_tensors_hooks(lambda one: one, lambda one: one),
    "on the CPU": save_on_cpu,
}


ca.register_norm_act(NormAct, tail=lambda module: [module.act])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(conv(8, 8), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(conv(8, 8), nn.BatchNorm2d(8), NormAct(8), nn.GroupNorm(2, 8)),
    )


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def in_turns(programs: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, float]:
        return {name: 1.0 + (name != "kept") for name in programs}

    monkeypatch.setattr(norm_measuring, "_forms", lambda given: list(FORMS))
    monkeypatch.setattr(norm_measuring, "time_in_turns", in_turns)
    ca.forget()
    with norms_on_cpu(), served_on_cpu():
        yield
    ca.forget()


def step(
    model: nn.Module,
    x: Tensor,
    forward: Callable[[], AbstractContextManager[Any]],
    backward: Callable[[], AbstractContextManager[Any]],
) -> list[Tensor]:
    given = x.clone().requires_grad_()
    with forward():
        output = checkpoint(model, given, use_reentrant=False)
    with backward():
        output.float().square().sum().backward()
    assert given.grad is not None
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    buffers = [b.clone() for b in model.buffers()]
    return [output.detach(), given.grad, *gradients, *buffers]


@pytest.mark.parametrize("where", ["forward", "recomputation"])
@pytest.mark.parametrize("is_chosen", [True, False], ids=["chosen", "first call"])
@pytest.mark.parametrize("name", AROUND)
def test_what_is_around_one_of_them_changes_nothing(name: str, is_chosen: bool, where: str) -> None:
    plain = model()
    ours = ca.convert(copy.deepcopy(plain))
    (x,) = data(4, 8, 6, 5, count=1)
    contexts = [AROUND[name], nullcontext][:: 1 if where == "forward" else -1]
    if where == "recomputation" and name in ("autocast", "hooks", "on the CPU"):
        contexts = [AROUND[name], AROUND[name]]  # PyTorch's model does not train otherwise
    for one in (ours, plain):
        if is_chosen:
            one(x.clone().requires_grad_()).square().sum().backward()
            one.zero_grad()
    found = step(ours, x, *contexts)
    expected = step(plain, x, *contexts)
    for actual, wanted in zip(found, expected, strict=True):
        tolerance = 5e-2 if name == "autocast" else 1e-4
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def test_a_checkpoint_within_a_served_model() -> None:
    """Only the norms within the checkpoint are PyTorch's."""
    inner = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())
    norm = nn.BatchNorm2d(8)
    outer = ca.convert(nn.ModuleList([norm, inner]))
    with norms_on_cpu() as served, ca.flags(sampling="heuristic"):
        x = torch.randn(4, 8, 6, 5, requires_grad=True)
        y = checkpoint(outer[1], outer[0](x), use_reentrant=False)
        assert served == ["identity"]
        y.sum().backward()
        assert served == ["identity"]


@pytest.mark.parametrize("grad", [True, False])
def test_a_reentrant_checkpoint(grad: bool) -> None:
    plain = model()
    ours = ca.convert(copy.deepcopy(plain))
    (x,) = data(4, 8, 6, 5, count=1)
    results = []
    for one in (ours, plain):
        given = x.clone().requires_grad_()
        with Functions() if grad else nullcontext():
            output = checkpoint(one, given, use_reentrant=True)
        output.square().sum().backward()
        assert given.grad is not None
        results.append([given.grad, *(b for b in one.buffers())])
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
