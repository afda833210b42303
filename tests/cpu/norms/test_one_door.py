"""The policy that serves a call of PyTorch's convolution, and the layers of PyTorch above it.

The kernels are registered for the CPU, where the operators compute by ATen. A dispatch mode looks
at the policy where the kernels will.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.watched_calls import BACKWARD, FORWARD, Watched
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cudnn_autotune as ca
from cudnn_autotune import _C

CLASSES = [f"{kind}{dims}d" for kind in ("Conv", "ConvTranspose") for dims in (1, 2, 3)]


@pytest.fixture(autouse=True)
def no_scope_outlives(on_cpu: None) -> Iterator[None]:
    ca.disable()
    yield
    ca.disable()
    assert policy() is None, "a scope outlived its call"


def policy() -> tuple[str, int] | None:
    found: tuple[str, int] | None = _C.policy_of_call(torch.empty(0))
    return found


def layer(name: str, **keywords: Any) -> Any:
    return getattr(ca, name)(4, 6, 3, **keywords)


def input_of(name: str) -> Tensor:
    return torch.randn(2, 4, *[7] * int(name[-2]), requires_grad=True)


# The policy of a layer


@pytest.mark.parametrize("name", [*CLASSES, *(f"Lazy{name}" for name in CLASSES)])
def test_a_layers_policy_holds_for_its_forward_and_its_backward(name: str) -> None:
    arguments = (6, 3) if "Lazy" in name else (4, 6, 3)
    made = getattr(ca, name)(*arguments, sampling="till_stable", workspace_limit=4096)
    with Watched() as watched:
        made(input_of(name)).sum().backward()
    assert watched.calls == [
        (FORWARD, ("till_stable", 4096)),
        (BACKWARD, ("till_stable", 4096)),
    ]


def test_each_of_two_layers_keeps_its_own() -> None:
    one, other = layer("Conv2d", sampling="race"), ca.Conv2d(6, 4, 3, workspace_limit=0)
    plain = nn.Conv2d(4, 4, 1)
    with Watched() as watched:
        plain(other(one(input_of("Conv2d")))).sum().backward()
    setting = ca.get_sampling()
    first, second = ("race", -1), (setting, 0)
    assert watched.policies == [first, ("", 0), None, None, second, first]


def test_a_layer_without_arguments_is_served_by_the_settings_of_its_forward() -> None:
    made = layer("Conv2d")
    with Watched() as watched:
        with ca.flags("race"):
            y = made(input_of("Conv2d"))
        y.sum().backward()
    assert watched.policies == [("", -1), ("race", -1)]


def test_the_process_serves_what_has_no_policy_of_its_own() -> None:
    made, plain = layer("Conv2d", sampling="race"), nn.Conv2d(6, 4, 3)
    with ca.enable("heuristic", workspace_limit=8), Watched() as watched:
        plain(made(input_of("Conv2d"))).sum().backward()
    process, own = ("heuristic", 8), ("race", -1)
    assert watched.policies == [own, process, process, own]


@pytest.mark.parametrize("name", CLASSES)
def test_derivatives_of_any_order_have_the_policy_of_the_forward(name: str) -> None:
    made, x = layer(name, sampling="race"), input_of(name)
    with Watched() as watched:
        value = made(x).pow(3).sum()
        for _ in range(3):
            (derivative,) = torch.autograd.grad(value, x, create_graph=True)
            value = derivative.pow(2).sum()
        value.backward()
    assert len(watched.calls) > 10
    assert set(watched.policies) == {("race", -1)}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_computes_again_with_the_policy(use_reentrant: bool) -> None:
    made = layer("Conv2d", sampling="race")
    with Watched() as watched:
        # The second computation ends with the last tensor that is saved.
        function = lambda x: made(x).relu()  # noqa: E731
        checkpoint(function, input_of("Conv2d"), use_reentrant=use_reentrant).sum().backward()
    assert [name for name, _ in watched.calls] == [FORWARD, FORWARD, BACKWARD]
    assert set(watched.policies) == {("race", -1)}


def test_a_backward_on_another_thread_has_the_policy() -> None:
    made = layer("Conv2d", sampling="race")
    y = made(input_of("Conv2d")).sum()
    seen: list[Any] = []

    def run() -> None:
        with Watched() as watched:
            y.backward()
        seen.extend(watched.policies)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [("race", -1)]


def test_threads_do_not_see_each_others() -> None:
    first, second = (layer("Conv2d", sampling=mode) for mode in ("race", "heuristic"))
    barrier = threading.Barrier(2)
    seen: dict[str, list[Any]] = {}

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            barrier.wait()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            barrier.wait()
            return gradient

    def run(made: Any) -> None:
        with Watched() as watched:
            made(Meeting.apply(made(input_of("Conv2d")[:, :4]).mean(1, keepdim=True).expand(
                2, 4, 5, 5))).sum().backward()  # fmt: skip
        seen[made.sampling] = watched.policies

    threads = [threading.Thread(target=run, args=[made]) for made in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {mode: [(mode, -1)] * 4 for mode in ("race", "heuristic")}


def test_autocast_casts_and_keeps_the_policy() -> None:
    made = layer("Conv2d", sampling="race")
    with Watched() as watched, torch.autocast("cpu", dtype=torch.bfloat16):
        y = made(input_of("Conv2d"))
        y.float().sum().backward()
    assert y.dtype is torch.bfloat16
    assert watched.policies == [("race", -1)] * 2


def test_no_gradient_leaves_no_label_and_an_error_no_scope() -> None:
    made = layer("Conv2d", sampling="race")
    with torch.no_grad():
        assert made(input_of("Conv2d")).grad_fn is None
    with pytest.raises(RuntimeError, match="to have 4 channels"):
        made(torch.randn(2, 3, 7, 7))
    assert policy() is None


def test_a_label_keeps_nothing_alive() -> None:
    made, x = layer("Conv2d", sampling="race"), input_of("Conv2d")
    y = made(x)
    watched = weakref.ref(y)
    y.sum().backward()
    del y
    assert watched() is None


# A converted forward


def helper(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight)


TABLE = {"conv": F.conv2d}


class Calls(nn.Module):
    """Calls PyTorch's function in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))
        function = F.conv2d
        self.ways: dict[str, Callable[..., Tensor]] = {
            "helper": helper,
            "closure": lambda x, w: function(x, w),
            "table": lambda x, w: TABLE["conv"](x, w),
            "attribute": F.conv2d,
            "by name": lambda x, w: getattr(torch, "conv" + "2d")(x, w),
            "keywords": lambda x, w: F.conv2d(weight=w, input=x),
        }
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[self.way](x, self.weight)


@pytest.mark.parametrize("way", ["helper", "closure", "table", "attribute", "by name", "keywords"])
@pytest.mark.parametrize("nested", [False, True])
def test_what_a_forward_calls_is_served_in_whatever_way(way: str, nested: bool) -> None:
    model = ca.convert(nn.Sequential(Calls(way)) if nested else Calls(way), sampling="race")
    x = torch.randn(2, 4, 7, 7)
    with Watched() as watched:
        y = model(x)
        y.sum().backward()
    assert watched.calls == [(FORWARD, ("race", -1)), (BACKWARD, ("race", -1))]
    ca.revert(model)
    with Watched() as watched:
        assert torch.equal(model(x), y)
    assert watched.policies == [None]


def test_a_gradient_within_a_forward_has_the_policy_of_its_own_forward() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            return torch.autograd.grad(self.layer(x).sum(), x)[0]

    model = ca.convert(Penalty(), sampling="race")
    model.layer.sampling = "heuristic"
    with Watched() as watched:
        model(torch.randn(2, 4, 7, 7))
    assert watched.policies == [("heuristic", -1)] * 2


# The layers of PyTorch above the kernels


@pytest.mark.parametrize("name", CLASSES)
def test_the_derivatives_are_right(name: str) -> None:
    made = layer(name).double()
    x = torch.randn(1, 4, *[4] * int(name[-2]), dtype=torch.float64, requires_grad=True)
    assert gradcheck(made, x, fast_mode=True)
    assert gradgradcheck(made, x, fast_mode=True)
    assert gradcheck(made, x, fast_mode=True, check_forward_ad=True, check_backward_ad=False)
    assert gradcheck(made, x, fast_mode=True, check_batched_grad=True)


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "ConvTranspose2d"])
def test_transforms_are_pytorchs(name: str) -> None:
    made = layer(name, sampling="race")
    theirs = getattr(nn, name)(4, 6, 3)
    theirs.load_state_dict(made.state_dict())
    parameters, x = dict(made.named_parameters()), input_of(name).detach()

    def loss(module: nn.Module) -> Callable[..., Tensor]:
        return lambda p, x: torch.func.functional_call(module, p, (x[None],)).square().sum()

    found, expected = (
        torch.func.vmap(torch.func.grad(loss(module)), (None, 0))(parameters, x)
        for module in (made, theirs)
    )
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient)
    tangents = torch.func.jvp(made, (x,), (x,)), torch.func.jvp(theirs, (x,), (x,))
    torch.testing.assert_close(*tangents)


@pytest.mark.filterwarnings("ignore")
def test_expanded_weights_give_per_sample_gradients() -> None:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    model = ca.convert(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3)))
    x = torch.randn(3, 4, 7, 7)
    call_for_per_sample_grads(model, batch_size=3)(x).sum().backward()
    found = model[0].weight.grad_sample
    for i in range(3):
        (expected,) = torch.autograd.grad(model(x[i : i + 1]).sum(), model[0].weight)
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-4)


def test_a_selective_checkpoint_knows_the_convolution() -> None:
    saved = []

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.convolution.default:
            if not ctx.is_recompute:
                saved.append(op)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    model = ca.convert(nn.Sequential(*[nn.Conv2d(4, 4, 1) for _ in range(4)]))
    x = input_of("Conv2d")
    with Watched() as watched:
        y = checkpoint(
            model,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(choose),
        )
        y.sum().backward()
    assert len(saved) == 4
    assert [name for name, _ in watched.calls].count(BACKWARD) == 4


def test_function_modes_and_subclasses_see_pytorchs_function() -> None:
    seen: list[Any] = []

    class Users(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Subclass(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(2, 4, 7, 7)
    for call in (layer("Conv2d"), ca.convert(Calls("helper")), ca.convert(nn.Conv2d(4, 6, 3))):
        with Users():
            call(x)
        assert F.conv2d in seen
        seen.clear()
        assert isinstance(call(x.as_subclass(Subclass)), Subclass)
        assert F.conv2d in seen
        seen.clear()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_uneven_padding(use_reentrant: bool) -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, 4))
            self.layer = nn.Conv1d(4, 4, 4, padding="same")

        def forward(self, x: Tensor) -> Tensor:
            function = lambda x: self.layer(F.conv1d(x, self.weight, padding="same"))  # noqa: E731
            y: Tensor = checkpoint(function, x, use_reentrant=use_reentrant)
            return y

    model, x = ca.convert(Same()), torch.randn(2, 4, 9, requires_grad=True)
    model(x).sum().backward()
    expected = torch.autograd.grad(
        model.layer(F.conv1d(x, model.weight, padding="same")).sum(), (x, model.weight)
    )
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(model.weight.grad, expected[1])
