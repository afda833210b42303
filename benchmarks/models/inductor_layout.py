"""Inductor's layout of a training graph, corrected in the versions of torch that have a fault.

Some versions lower the backward of convolutions in the layout of their graph, and choose that by
the convolutions' forward alone. A backward graph has none, so it is never laid out in
channels_last (pytorch issue 189239). The correction counts a backward as its forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def nothing_to_mend() -> str:
    """Returns the reason why this torch needs no correction; empty if it has the fault."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.kernel import conv

    torch_ = f"torch {torch.__version__}"
    if not hasattr(conv, "convolution_backward_lowering"):
        return f"{torch_} runs the backward of convolutions in the layout of its inputs"
    if GraphLowering.decide_layout_opt(_lone_backward(), is_inference=False):
        return f"{torch_} counts the backward of convolutions"
    return ""


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Corrects the choice of a layout in the block."""
    from torch._inductor.graph import GraphLowering

    decide = GraphLowering.decide_layout_opt

    def corrected(graph_module: Any, *, is_inference: bool) -> bool:
        return decide(_as_forward(graph_module), is_inference=is_inference)

    with mock.patch.object(GraphLowering, "decide_layout_opt", staticmethod(corrected)):
        yield


def _as_forward(graph_module: Any) -> Any:
    """Returns a copy of a graph in which each backward of a convolution is its forward."""
    graph = fx.Graph()
    graph.graph_copy(graph_module.graph, {})
    for node in graph.nodes:
        if node.target is _BACKWARD:
            _, x, weight, _, *how, _ = node.args
            node.target, node.args = _FORWARD, (x, weight, None, *how)
    return SimpleNamespace(graph=graph)


def _lone_backward() -> Any:
    """Returns the backward of a convolution for which channels_last is chosen, on no device."""
    graph = fx.Graph()
    shapes = {"gradient": (8, 128, 14, 14), "x": (8, 128, 14, 14), "weight": (128, 128, 3, 3)}
    tensors = [graph.placeholder(name) for name in shapes]
    for tensor, shape in zip(tensors, shapes.values(), strict=True):
        tensor.meta["val"] = torch.empty(shape, device="meta")
    how = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    graph.call_function(_BACKWARD, (*tensors, *how))
    return SimpleNamespace(graph=graph)
