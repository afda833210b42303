"""The problems that a first backward searches are known while Inductor compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import cudnn_autotune as ca
from cudnn_autotune.compile import entry, gradients, programs, training_graph
from cudnn_autotune.engines.problem import ConvProblem

OPERATORS = {
    getattr(torch.ops.cudnn_autotune, name).default
    for name in ("conv_fprop", "conv_dgrad", "conv_wgrad")
}


class Called(TorchDispatchMode):
    """Records the problems of the gradients that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[ConvProblem] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in OPERATORS:
            self.problems.append(problem(func, *args))
        return func(*args, **(kwargs or {}))


def problem(operator: Any, *args: Any) -> ConvProblem:
    """The problem of a call with these tensors and numbers."""
    graph = Graph()

    def placeholder(value: Tensor) -> Any:
        node = graph.placeholder("value")
        node.meta["val"] = value
        return node

    return gradients.problem_of(
        graph.call_function(operator, tree_map_only(Tensor, placeholder, args))
    )


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> list[set[ConvProblem]]:
    """The problems of each graph whose gradients are compiled ahead, as if it were on a GPU."""
    found: list[set[ConvProblem]] = []

    def record(graph: Graph) -> None:
        nodes = [node for node in graph.nodes if node.target in OPERATORS]
        found.append({gradients.problem_of(node) for node in nodes})

    for module in (programs, training_graph):
        monkeypatch.setattr(module, "start_gradients", record)
    monkeypatch.setattr(entry, "_why_plain", lambda *_: None)
    return found


def one_way(dims: int) -> nn.Module:
    conv, up = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "ConvTranspose"))
    return nn.Sequential(conv(4, 8, 3, 2, 1), nn.ReLU(), up(8, 6, 2, 2), conv(6, 6, 1, groups=2))


@pytest.mark.basic(2)
@pytest.mark.parametrize("is_laid_out", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_a_backward_computes_is_known_before(
    dims: int, is_laid_out: bool, begun: list[set[ConvProblem]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_graph, "favours_channels_last", lambda *_, **__: is_laid_out)
    options = {"compare": False, "cpp.weight_prepack": False, "layout_optimization": False}
    model = one_way(dims)
    call = torch.compile(model, backend="cudnn_autotune", options=options)
    x = torch.randn(2, 4, *(12, 8, 6)[:dims], requires_grad=True)
    call(x).sin().sum().backward()
    output = call(x).sin().sum()
    with Called() as called:
        output.backward()
    assert len(called.problems) == 6
    assert {one.op for one in called.problems} == {"fprop", "dgrad", "wgrad"}
    formats = {torch.contiguous_format}
    if is_laid_out:
        formats = {torch.channels_last_3d if dims == 3 else torch.channels_last}
    assert {one.memory_format for one in called.problems} == formats
    # The joint graph, whose strides hold where they are asked for, and the backward.
    assert begun == [set(called.problems)] * (1 + is_laid_out)
    assert ca.compilations()[-1].note == ""
