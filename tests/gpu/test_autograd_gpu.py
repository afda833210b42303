"""Derivatives, autocast, compilation and function transforms on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.conv.op_cases import CASES, ops
from support.conv.references import assert_close
from support.conv.training_steps import twin_layers
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca


@pytest.fixture(autouse=True)
def exact_and_untimed(cudnn_flags: Callable[..., None]) -> None:
    """These tests are about derivatives; which engine serves them is no matter."""
    ca.set_sampling("heuristic")
    cudnn_flags(allow_tf32=False, deterministic=True)


@pytest.mark.parametrize("name", ["padding", "stride_leaves_a_rest", "depthwise", "groups"])
def test_derivatives(name: str) -> None:
    case = CASES[name]
    input, weight, bias, _ = case.tensors("cuda")
    arguments = case.geometry
    tensors = (input, weight, bias)
    assert gradcheck(lambda *t: ca.functional.conv2d(*t, *arguments), tensors, fast_mode=True)
    assert gradgradcheck(lambda *t: ca.functional.conv2d(*t, *arguments), tensors, fast_mode=True)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opcheck(dtype: torch.dtype, channels_last: bool) -> None:
    """The operators stand below autograd."""
    case = CASES["groups"]
    input, weight, bias, grad_output = case.tensors("cuda", dtype, False, channels_last)
    for op, arguments in (
        (ops.conv_fprop, (input, weight, bias, *case.geometry)),
        (ops.conv_dgrad, (grad_output, weight, list(case.input_shape), *case.geometry)),
        (ops.conv_wgrad, (grad_output, input, list(case.weight_shape), *case.geometry)),
    ):
        found = opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


def test_derivatives_are_searched_in_the_mode_of_the_layer(input: Tensor) -> None:
    """Autograd computes them on a thread of its own, also after the settings have changed."""
    layer = ca.Conv2d(8, 12, 3, sampling="sample_once", workspace_limit=2**20).cuda()
    x = input.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    made = {(c.problem.op, c.sampling, c.workspace_limit) for c in ca.choices()}
    assert made == {(op, "sample_once", 2**20) for op in ("fprop", "dgrad", "wgrad")}


@pytest.fixture
def layers() -> tuple[nn.Conv2d, ca.Conv2d]:
    return twin_layers(8, 12, 3, padding=1)


@pytest.fixture
def input() -> Tensor:
    return torch.randn(4, 8, 11, 10, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_backward_under_autocast_is_judged_in_its_own_type(
    layers: tuple[nn.Conv2d, ca.Conv2d], input: Tensor, dtype: torch.dtype
) -> None:
    """Autocast would recast the reference, and right engines would be rejected for it."""
    _, ours = layers
    ours.sampling = "race"
    output = ours(input)
    with torch.autocast("cuda", dtype=dtype):
        output.sum().backward()
    made = {choice.problem.op: choice for choice in ca.choices()}
    assert set(made) == {"fprop", "wgrad"}
    assert all(choice.problem.dtype is torch.float32 for choice in made.values())
    assert not made["wgrad"].rejected


def test_forward_mode_dual_numbers(layers: tuple[nn.Conv2d, ca.Conv2d], input: Tensor) -> None:
    """Without torch.func, too: silent zeros are what a missing rule gives."""
    import torch.autograd.forward_ad as forward_ad

    tangents = []
    for module in layers:
        with forward_ad.dual_level():
            output = module(forward_ad.make_dual(input, torch.ones_like(input)))
            tangents.append(forward_ad.unpack_dual(output).tangent)
    assert_close(tangents[1], tangents[0], 1e-5)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "weight and bias"])
def test_frozen(layers: tuple[nn.Conv2d, ca.Conv2d], input: Tensor, frozen: str) -> None:
    gradients = []
    for module in layers:
        module.weight.requires_grad_("weight" not in frozen)
        module.bias.requires_grad_("bias" not in frozen)
        leaf = input.detach().clone().requires_grad_(frozen != "input")
        module(leaf).sin().sum().backward()
        gradients.append([leaf.grad, module.weight.grad, module.bias.grad])
    for right, mine in zip(*gradients, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert_close(mine, right, 1e-5)
    ops_run = {c.problem.op for c in ca.choices()}
    assert ("wgrad" in ops_run) == ("weight" not in frozen)
    assert ("dgrad" in ops_run) == (frozen != "input")


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(layers: tuple[nn.Conv2d, ca.Conv2d], input: Tensor, reentrant: bool) -> None:
    results = []
    for module in layers:
        leaf = input.detach().clone().requires_grad_()
        checkpoint(module, leaf, use_reentrant=reentrant).sin().sum().backward()
        results.append([leaf.grad, module.weight.grad])
    for right, mine in zip(*results, strict=True):
        assert_close(mine, right, 1e-5)
