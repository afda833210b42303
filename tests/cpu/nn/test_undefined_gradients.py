"""A gradient that is not there stays not there, as by PyTorch: a zero would let weight decay move a
weight that has none. On a CPU the operators compute by ATen, and their autograd is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cudnn_autotune as ca

CLASSES = {
    "Conv1d": (3, 9),
    "Conv2d": (3, 9, 8),
    "Conv3d": (3, 5, 6, 7),
    "ConvTranspose1d": (3, 9),
    "ConvTranspose2d": (3, 5, 6),
    "ConvTranspose3d": (3, 4, 5, 6),
}


class Stops(torch.autograd.Function):
    """The identity; its input has no gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


pytestmark = pytest.mark.usefixtures("on_cpu")


def found_in(leaves: list[Tensor], run: Callable[[], Tensor]) -> list[bool]:
    """Which of the leaves have a gradient after a backward."""
    for leaf in leaves:
        leaf.grad = None
    run().sum().backward()
    return [leaf.grad is not None for leaf in leaves]


def layer_of(namespace: Any, name: str) -> Any:
    torch.manual_seed(0)
    return getattr(namespace, name)(3, 4, 3, padding=1)


@pytest.mark.parametrize("name", CLASSES)
def test_a_layers_gradients(name: str) -> None:
    counts = []
    for namespace in (nn, ca):
        layer = layer_of(namespace, name)
        x = torch.randn(2, *CLASSES[name], requires_grad=True)
        leaves = [x, *layer.parameters()]
        assert found_in(leaves, lambda layer=layer, x=x: layer(x)) == [True] * 3
        counts.append(found_in(leaves, lambda layer=layer, x=x: Stops.apply(layer(x))))
    assert counts[0] == counts[1] == [False] * 3


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "conv_transpose2d"])
def test_a_functions_gradients(name: str) -> None:
    dims = int(name[-2])
    x = torch.randn(2, 4, *[6] * dims, requires_grad=True)
    w = torch.randn(4, 4, *[3] * dims, requires_grad=True)
    b = torch.randn(4, requires_grad=True)
    for functions in (F, ca.functional):
        function = getattr(functions, name)
        assert found_in([x, w, b], lambda f=function: f(x, w, b)) == [True] * 3
        assert found_in([x, w, b], lambda f=function: Stops.apply(f(x, w, b))) == [False] * 3


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("first", [(0,), (1,), (0, 1)], ids=["of input", "of weight", "of both"])
@pytest.mark.parametrize("stops", [(True, True), (True, False), (False, True)], ids=str)
def test_a_double_backwards_gradients(
    name: str, first: tuple[int, ...], stops: tuple[bool, bool]
) -> None:
    """Of the gradients of the input and the weight, some are used further on, and some are not."""
    counts = []
    for namespace in (nn, ca):
        layer = layer_of(namespace, name)
        x = torch.randn(2, *CLASSES[name], requires_grad=True)
        y = layer(x)
        upstream = torch.randn_like(y, requires_grad=True)
        wanted = [(x, layer.weight)[i] for i in first]
        gradients = torch.autograd.grad(y, wanted, upstream, create_graph=True)
        kept = [
            Stops.apply(gradient) if stops[i] else gradient
            for i, gradient in zip(first, gradients, strict=True)
        ]
        leaves = [x, layer.weight, upstream]
        counts.append(found_in(leaves, lambda kept=kept: sum(k.sum() for k in kept)))
    assert counts[0] == counts[1]
