"""While a forward is searched, what its backward will need is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

import cudnn_autotune as ca
from cudnn_autotune.store import kept_plans
from cudnn_autotune.tuning import compiling_ahead

pytestmark = pytest.mark.compiles

# Of a shape that no other test has. Engines for depthwise layers are compiled at run time.
SHAPE = (3, 40, 23, 29)


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    ca.forget()
    compiling_ahead._drop(list(compiling_ahead._begun))
    yield
    ca.forget()


def layer(sampling: str = "auto") -> nn.Conv2d:
    made: nn.Conv2d = ca.Conv2d(40, 40, 5, padding=2, groups=40, bias=False, sampling=sampling)
    return made.to("cuda", torch.float16, memory_format=torch.channels_last)


def image(requires_grad: bool = True) -> torch.Tensor:
    x = torch.randn(SHAPE, device="cuda", dtype=torch.float16)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_(requires_grad)


def begun() -> int:
    return len(compiling_ahead._begun)


def test_the_backward_takes_what_was_compiled() -> None:
    x, conv = image(), layer()
    y = conv(x)
    assert begun() == 2
    for listing in list(compiling_ahead._begun.values()):
        wait(listing.result(60).values(), 60)
    compiled = kept_plans.counts()["compiled"]
    y.sum().backward()
    assert begun() == 0
    assert kept_plans.counts()["compiled"] == compiled
    exact = [t.detach().double().requires_grad_() for t in (x, conv.weight)]
    conv2d(*exact, padding=2, groups=40).sum().backward()
    torch.testing.assert_close(x.grad.double(), exact[0].grad, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(conv.weight.grad.double(), exact[1].grad, rtol=2e-2, atol=2e-1)


def test_a_first_layer_has_no_gradient_of_its_input() -> None:
    layer()(image(requires_grad=False))
    assert begun() == 1


@pytest.mark.parametrize("is_frozen", [False, True])
def test_without_a_gradient_nothing_is_compiled(is_frozen: bool) -> None:
    conv, x = layer(), image(requires_grad=not is_frozen)
    conv.requires_grad_(not is_frozen)
    with nullcontext() if is_frozen else torch.no_grad():
        conv(x)
    assert begun() == 0


def test_calls_under_enable_begin_their_backward() -> None:
    x, w = image(), torch.randn(40, 1, 5, 5, device="cuda", dtype=torch.float16)
    with ca.enable(sampling="auto"):
        y = conv2d(x, w.requires_grad_(), padding=2, groups=40)
        assert begun() == 2
        y.sum().backward()
    assert begun() == 0


def test_modes_that_time_nothing_compile_nothing() -> None:
    layer("heuristic")(image())
    assert begun() == 0
