"""What a first step searches and compiles is known while Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.norms.models import SmallResNet, SqueezeExcite
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import cudnn_autotune as ca
from cudnn_autotune.compile import entry, gradients, norms, programs, training_graph
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.norms import reference
from cudnn_autotune.norms.plan import NormProblem, problem_of
from cudnn_autotune.norms.reference import Operands

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


@pytest.mark.search
def test_nothing_begins_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ours, graph = torch.ops.cudnn_autotune, Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(2, 8, 9, 9, device="cuda")
    sizes = ([8, 8, 3, 3], [1, 1], [1, 1], [1, 1], 1)
    graph.call_function(ours.conv_wgrad.default, (x, x, *sizes))
    gradients.start_gradients(graph)
    norm = graph.call_function(ours.batch_norm_act.default, (x, None, None, None, "relu", 0.1))
    norms.start_norm(norm, torch.channels_last)


@pytest.mark.basic(3)
@pytest.mark.parametrize(("model", "channels"), [(SmallResNet, 3), (SqueezeExcite, 8)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_a_step_are_known_before(
    model: type[nn.Module],
    channels: int,
    layout: torch.memory_format,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: None,
) -> None:
    known, computed = list[NormProblem | None](), list[NormProblem]()

    def record(node: Node, memory_format: torch.memory_format) -> None:
        known.append(norms.problem_of_node(node, memory_format))

    def recorded(given: Any, compute: Callable[[Any], Any]) -> Any:
        computed.append(problem_of(given))
        return compute(given)

    for name in ("forward", "backward"):
        compute = getattr(reference, name)
        monkeypatch.setattr(reference, name, partial(recorded, compute=compute))
    monkeypatch.setattr(norms, "start_norm", record)
    monkeypatch.setattr(entry, "_why_plain", lambda *_: None)
    options = {"compare": False, "norms": "always"}
    trained = model().to(memory_format=layout)
    call = torch.compile(trained, backend="cudnn_autotune", options=options)
    x = torch.randn(4, channels, 32, 32).to(memory_format=layout)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        call(x).sum().backward()
    assert len(computed) == 2 * len(ca.compilations()[-1].norms) > 0
    assert {one.dtype for one in computed} == {dtype}
    assert set(known) == set(computed)


@pytest.mark.search
def test_the_problem_of_a_call_reads_no_values() -> None:
    x = torch.empty(2, 16, 5, 7, 3, device="meta", dtype=torch.float16)
    rows, odd = x.to(memory_format=torch.channels_last_3d), x[..., ::2]
    assert problem_of(Operands(x, None, None, None, "relu", 0.1)) == NormProblem(
        is_backward=False,
        dtype=torch.float16,
        parameters=torch.float32,
        batch=2,
        channels=16,
        spatial=105,
        planes=True,
        alignment=16,
        activation="relu",
    )
    of_rows = problem_of(Operands(rows, None, None, rows, "relu", 0.1), alignment=8)
    assert (of_rows.planes, of_rows.mask, of_rows.residual) == (False, True, True)
    assert of_rows.alignment == 8
    of_odd = problem_of(Operands(odd, None, None, odd, "silu", 0.1))
    assert (of_odd.planes, of_odd.mask, of_odd.spatial) == (True, False, 70)
