"""Each SiLU of a graph becomes one call, and values stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile.rewritten import OPTIONS, run
from support.conv.references import TOLERANCES, assert_close
from support.models.made import Made
from torch import Tensor, nn
from torch.fx import GraphModule

from cudnn_autotune.compile import activations, programs

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators of the compiled graphs."""
    found: list[Any] = []
    compile_tagged = programs.compile_tagged

    def compile_and_tell(graph: GraphModule, inputs: Any, **arguments: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes)
        return compile_tagged(graph, inputs, **arguments)

    monkeypatch.setattr(programs, "compile_tagged", compile_and_tell)
    return found


def before_conv(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Made(lambda model, x: model.conv(function(x)), conv=nn.Conv2d(8, 8, 3, padding=1))


MODELS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    # The function, and its SiLUs that are calls.
    "one": (lambda x: F.silu(2 * x), 1),
    "spelled": (lambda x: x * torch.sigmoid(x), 1),
    "two": (lambda x: F.silu(F.silu(x) - 1), 2),
    "one after the other": (lambda x: F.silu(F.silu(F.silu(x, inplace=False))), 3),
    "concatenation": (lambda x: torch.cat([x[:, 4:], F.silu(x + 1)[:, 4:]], dim=1), 1),
    "an argument that others read": (lambda x: F.silu(y := x.cos()) + y, 1),
    "module": (nn.SiLU(), 1),
    "sigmoid that others read": (lambda x: x * (s := torch.sigmoid(x)) + s, 0),
    "another activation": (lambda x: F.hardswish(x) + torch.sigmoid(x), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, dtype: torch.dtype, operators: list[Any]) -> None:
    function, expected = MODELS[name]
    model, x = before_conv(function).to(dtype).eval(), torch.randn(2, 8, 9, 7).to(dtype)
    assert_close(run(model, x), copy.deepcopy(model).double()(x.double()), TOLERANCES[dtype])
    assert operators.count(activations.SILU) == expected


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "integers": lambda x: (i := (4 * x).int()) * torch.sigmoid(i),
    "truths": lambda x: (i := x > 0) * torch.sigmoid(i),
    "wide": lambda x: F.silu(x.double()).half(),
    "narrow": lambda x: F.silu(x.half().float()).bfloat16(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes_stay(name: str) -> None:
    function = OTHERS[name]
    model = Made(lambda model, x: (model.conv(x), function(x)), conv=nn.Conv2d(8, 8, 1)).eval()
    x = torch.randn(1, 8, 5, 4)
    torch.testing.assert_close(run(model, x)[1], function(x), atol=1e-2, rtol=1e-2)


def test_a_convolution_of_another_dtype_than_its_silu() -> None:
    model = Made(lambda model, x: F.silu(model.conv(x).float()).half(), conv=nn.Conv2d(8, 8, 1))
    model, x = model.bfloat16().eval(), torch.randn(1, 8, 5, 4).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(run(model, x), model(x), atol=2e-2, rtol=2e-2)


def test_what_is_not_finite_is_pytorch_s(operators: list[Any]) -> None:
    ends = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 88.0, -104.0, 0.0])
    x = ends.expand(1, 8, 1, 8).contiguous()
    model = Made(lambda model, x: (model.conv(x), F.silu(x)), conv=nn.Conv2d(8, 8, 1)).eval()
    torch.testing.assert_close(run(model, x)[1], F.silu(x), equal_nan=True)
    assert operators.count(activations.SILU) == 1


def test_an_activation_in_a_convolution_s_engine_stays_there(operators: list[Any]) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.SiLU()).eval()
    x = torch.randn(1, 8, 9, 9)
    assert_close(run(model, x), model.double()(x.double()), TOLERANCES[torch.float32])
    assert activations.SILU not in operators


def test_training_keeps_its_operators(operators: list[Any]) -> None:
    model = before_conv(F.silu)
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    ours(torch.randn(1, 8, 9, 9, requires_grad=True)).sum().backward()
    assert activations.SILU not in operators
