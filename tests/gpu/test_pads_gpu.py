"""Zeros padded in front of convolutions are the convolutions' own padding on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import CONVOLUTIONS, TOLERANCES, assert_close, relative_error
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import cudnn_autotune as ca

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Paddings: all before, then all after.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "causal 1-d": ((4, 32, 100), (48, 32, 5), {"padding": (8, 0), "dilation": 2}),
    "strided 2-d": ((4, 32, 28, 27), (48, 32, 3, 3), {"padding": (0, 0, 1, 1), "stride": 2}),
    "grouped": ((2, 32, 9, 8), (32, 8, 3, 3), {"padding": (2, 0, 1, 1), "groups": 4}),
    "causal 3-d": ((1, 32, 5, 16, 14), (32, 32, 3, 3, 3), {"padding": (2, 1, 1, 0, 1, 1)}),
    "larger than the image": ((2, 16, 4, 5), (8, 16, 3, 3), {"padding": (9, 0, 0, 7)}),
    "few channels": ((1, 3, 4, 12, 9), (8, 3, 3, 3, 3), {"padding": (2, 1, 1, 0, 1, 1)}),
}


def operands(name: str, dtype: torch.dtype, last: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape, weight, _ = CASES[name]
    x, w, b = (torch.randn(size, device="cuda").to(dtype) for size in (shape, weight, weight[:1]))
    if last and len(shape) in LAST:
        x, w = (one.to(memory_format=LAST[len(shape)]) for one in (x, w))
    return x, w, b


def padded_first(x: Tensor, w: Tensor, b: Tensor | None, options: dict[str, Any]) -> Tensor:
    n = x.dim() - 2
    sides = options["padding"]
    x = F.pad(x, [size for d in reversed(range(n)) for size in sides[d::n]])
    return CONVOLUTIONS[n](x, w, b, **{**options, "padding": 0})


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_the_functions_take_both_sides(name: str, dtype: torch.dtype, last: bool) -> None:
    x, w, b = operands(name, dtype, last)
    options = CASES[name][2]
    function = getattr(ca.functional, f"conv{x.dim() - 2}d")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = padded_first(x.double(), w.double(), b.double(), options)
        found = function(x, w, b, sampling="sample_once", **options)
        assert_close(found, exact, TOLERANCES[dtype])
        assert found.stride() == padded_first(x, w, b, options).stride()
        gradients = []
        for call, tensors in ((function, (x, w)), (padded_first, (x.double(), w.double()))):
            given = [t.detach().clone().requires_grad_() for t in tensors]
            extra = options if call is function else {"options": options}
            call(*given, None, **extra).float().square().sum().backward()
            gradients.append([t.grad for t in given])
        for one, other in zip(*gradients, strict=True):
            assert one is not None
            assert other is not None
            assert_close(one, other, 5 * TOLERANCES[dtype])
    sides = {choice.problem.padding for choice in ca.choices() if choice.problem.op == "fprop"}
    assert options["padding"] in sides or x.dim() == 3


def test_nan_and_infinity_in_the_border() -> None:
    x, w, _ = operands("strided 2-d", torch.float16, True)
    w[0, 0, 2, 2] = torch.inf
    x[0, 0, 3, 3] = torch.nan
    options = CASES["strided 2-d"][2]
    expected = padded_first(x, w, None, options)
    found = ca.functional.conv2d(x, w, sampling="sample_once", **options)
    assert expected[:, 0, -1].isnan().any()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


def video() -> nn.Module:
    return nn.Sequential(
        nn.ZeroPad3d((1, 1, 1, 1, 2, 0)),
        nn.Conv3d(32, 32, 3),
        nn.SiLU(),
        nn.ZeroPad3d((0, 1, 0, 1, 0, 0)),
        nn.Conv3d(32, 48, (1, 3, 3), stride=(1, 2, 2)),
        nn.ReLU(),
    ).cuda()


def images() -> nn.Module:
    return nn.Sequential(
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(32, 64, 3, stride=2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ZeroPad2d(1),
        nn.Conv2d(64, 64, 3),
    ).cuda()


def input_of(make: Callable[[], nn.Module]) -> Tensor:
    size = (1, 32, 5, 32, 32) if make is video else (4, 32, 32, 32)
    return torch.randn(size, device="cuda")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("make", [video, images])
def test_a_compiled_model(make: Callable[[], nn.Module], last: bool) -> None:
    model, x = make().half().eval(), input_of(make).half()
    if last:
        model, x = (one.to(memory_format=LAST[x.dim()]) for one in (model, x))  # type: ignore[call-overload]
    exact = copy.deepcopy(model).double()(x.double())
    allowed = 3 * relative_error(model(x), exact)
    options = {"compare": False, "sampling": "sample_once"}
    compiled = torch.compile(model, backend="cudnn_autotune", options=options)
    with torch.no_grad():
        found, codes = run_and_get_code(compiled, x)
    assert_close(found, exact, allowed)
    assert not any("constant_pad" in code for code in codes)


@pytest.mark.parametrize("make", [video, images])
def test_a_compiled_step(make: Callable[[], nn.Module]) -> None:
    model, x = make(), input_of(make)
    options = {"compare": False, "sampling": "sample_once"}
    compiled = torch.compile(model, backend="cudnn_autotune", options=options)

    def step(call: Callable[..., Tensor], of: nn.Module, x: Tensor) -> list[Tensor]:
        of.zero_grad()
        given = x.detach().clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=x.dtype == torch.float32):
            y = call(given)
        y.float().square().mean().backward()
        gradients = [given.grad, *(one.grad for one in of.parameters())]
        return [y.detach(), *(one for one in gradients if one is not None)]

    found, codes = run_and_get_code(lambda: step(compiled, model, x))
    assert not any("constant_pad" in code for code in codes)
    eager = step(model, model, x)
    exact = step(twin := copy.deepcopy(model).double(), twin, x.double())
    for one, other, value in zip(found, eager, exact, strict=True):
        assert relative_error(one, value) <= 3 * relative_error(other, value) + 1e-3


@pytest.mark.parametrize("make", [video, images])
def test_a_converted_model(make: Callable[[], nn.Module]) -> None:
    model, x = make().half().eval(), input_of(make).half()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        allowed = 3 * relative_error(model(x), exact)
        ca.convert(model, sampling="sample_once", norms=False)
        assert_close(model(x), exact, allowed)
    paddings = {choice.problem.padding for choice in ca.choices()}
    expected = {(2, 1, 1, 0, 1, 1), (0, 0, 0, 0, 1, 1)}
    assert paddings == (expected if make is video else {(0, 0, 1, 1), (1, 1, 1, 1)})


def test_a_layer_of_timm() -> None:
    timm = pytest.importorskip("timm.layers")
    theirs = timm.Conv2dSame(32, 48, 3, stride=2).cuda().half()
    ours = ca.convert(copy.deepcopy(theirs), sampling="sample_once")
    x = torch.randn(4, 32, 28, 28, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        exact = copy.deepcopy(theirs).double()(x.double())
        assert_close(ours(x), exact, 3 * relative_error(theirs(x), exact))
    assert [choice.problem.padding for choice in ca.choices()] == [(0, 0, 1, 1)]
