"""Models that communicate with other ranks in their forward or backward; runs in each rank."""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import cudnn_autotune as ca
from cudnn_autotune.compile import judges
from cudnn_autotune.compile.communication import communicates
from cudnn_autotune.compile.groups import Group
from cudnn_autotune.compile.judges import Measured, Verdict


class _Reduced(torch.autograd.Function):
    """Sums gradients over the ranks, as tensor parallelism does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Communicates(nn.Module):
    """The ranks differ in speed, so that their clocks ask for other numbers of calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(0.01 * dist.get_rank())
        y = self.norm(self.conv(x)).relu()
        if self.kind == "functional":
            return funcol.all_reduce(y, "sum", dist.group.WORLD) * 2
        if self.kind == "legacy":
            y = y.clone()
            dist.all_reduce(y)
            return y * 2
        if self.kind == "backward":
            y = _Reduced.apply(y)
        return y * 2


class _ByClock(Measured):
    """A rank's own measurement, which another rank's contradicts."""

    def __call__(self, group: Group) -> Verdict:
        return Verdict(dist.get_rank() == 0, "measured")


def compiled(kind: str, by_clock: bool) -> dict[str, Any]:
    """What the backend makes of it, and whether its output is that of the model."""
    torch._dynamo.reset()
    model, x = Communicates(kind).eval(), torch.randn(2, 3, 16, 16)
    options = {"fuse": "always", "cpp.weight_prepack": False}
    replaced = {"always": _ByClock} if by_clock else {}
    with torch.no_grad(), mock.patch.dict(judges.JUDGES, replaced):  # type: ignore[arg-type]
        output = torch.compile(model, backend="cudnn_autotune", options=options)(x)
        error = (output - model(x)).norm() / output.norm()
    record = ca.compilations()[-1]
    return {
        "is_right": bool(error < 1e-5),
        "times": record.times_ms,
        "chosen": record.chosen,
        "note": record.note,
        "fused": len(record.fused),
    }


def laid_out(kind: str) -> tuple[bool, list[str]]:
    """Whether ``memory_format="auto"`` makes it channels_last, and what is warned of."""
    model, x = Communicates(kind), torch.randn(2, 3, 16, 16)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ca.convert(model, memory_format="auto", example_input=x)
    is_last = model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    return is_last, [str(w.message) for w in warned if "memory_format" in str(w.message)]


def graph_with(target: Any, *args: Any) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (*args, x)))
    return GraphModule(torch.nn.Module(), graph)


def foreign_operator_communicates() -> bool:
    """Whether an operator of a library that nobody knows counts as one that communicates."""
    library = torch.library.Library("a_users", "FRAGMENT")
    if not hasattr(torch.ops.a_users, "op"):
        library.define("op(Tensor x) -> Tensor")
    return communicates(graph_with(torch.ops.a_users.op.default))
