"""Models whose graphs PyTorch splits for ``DistributedDataParallel``; runs in each rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cudnn_autotune as ca
from cudnn_autotune.compile import entry
from support.conv.references import relative_error
from support.conv.served_on_cpu import served_on_cpu
from support.norms.models import errors, train

_CHANNELS = 192
WITHOUT_CONVOLUTION = "the graph has no convolution"


class _Net(nn.Module):
    """Layers of more than 1 MiB each, at which PyTorch splits the graph: the last one has no
    convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(_CHANNELS)
        self.second = nn.Conv2d(_CHANNELS, _CHANNELS, 3)
        self.last = nn.Linear(_CHANNELS, 1500)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x)).relu()
        y = self.last(self.second(y).relu().mean((2, 3)))
        return y


@dataclass(frozen=True)
class Found:
    """The results of a compiled model in training and without gradients."""

    errors: dict[str, float]
    """Errors of the steps from the plain model's."""
    error_without_gradients: float
    notes: list[str]
    """What is noted about each graph."""
    compared: list[set[str]]
    """Names of the programs of each graph that were compared."""


def trained_and_evaluated(options: dict[str, Any], device: str = "cpu") -> Found:
    """Trains a compiled model on other data on each rank, and evaluates it. A CPU takes the way of
    a GPU."""
    torch.manual_seed(0)
    plain = _Net().to(device)
    model = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = [torch.randn(4, _CHANNELS, 6, 5, generator=generator).to(device) for _ in range(2)]
    spread, theirs = (DistributedDataParallel(one, bucket_cap_mb=1) for one in (model, plain))
    torch._dynamo.reset()
    known = len(ca.compilations())
    with _like_a_gpu() if device == "cpu" else nullcontext():
        ours = torch.compile(spread, backend="cudnn_autotune", options=options)
        steps = train(ours, inputs, of=model)
        expected = train(theirs, inputs, of=plain)
        model.eval()
        plain.eval()
        with torch.no_grad():
            off = relative_error(ours(inputs[0]), theirs(inputs[0]))
    records = ca.compilations()[known:]
    notes, compared = [one.note for one in records], [set(one.times_ms) for one in records]
    return Found(errors(steps, expected), off, notes, compared)


def graphs_of_sizes(sizes: list[int]) -> int:
    """Returns the number of graphs that are compiled for batches of dynamic size."""

    class Padded(_Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.pad(x, (1, 0, 1, 0)))

    spread = DistributedDataParallel(Padded(), bucket_cap_mb=1)
    torch._dynamo.reset()
    known = len(ca.compilations())
    options = {"norms": "never", "compare": False, "cpp.weight_prepack": False}
    with _like_a_gpu():
        ours = torch.compile(spread, backend="cudnn_autotune", options=options, dynamic=True)
        for size in sizes:
            ours(torch.randn(size, _CHANNELS, 6, 5)).sum().backward()
    return len(ca.compilations()) - known


@contextmanager
def _like_a_gpu() -> Iterator[None]:
    def why_plain(graph: torch.fx.GraphModule, *_: Any) -> str | None:
        found = graph.graph.find_nodes(op="call_function", target=torch.conv2d, sort=False)
        return None if found else WITHOUT_CONVOLUTION

    with pytest.MonkeyPatch.context() as patch, served_on_cpu():
        patch.setattr(entry, "_why_plain", why_plain)
        yield
