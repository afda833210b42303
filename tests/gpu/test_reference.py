"""Every dtype, layout and direction against float64, through the layer that users call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import CASES as OP_CASES
from op_cases import ops
from references import assert_close, convolution, tolerance
from torch import Tensor, nn

import cudnn_autotune as ca

pytestmark = pytest.mark.gpu

SetFlags = Callable[..., None]

# (dtype, TF32 allowed)
TYPES = {
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp64": (torch.float64, False),
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

# input shape, output channels, kernel, keywords of nn.Conv2d
CASES: dict[str, tuple[tuple[int, ...], int, Any, dict[str, Any]]] = {
    "plain": ((4, 16, 20, 18), 32, 3, {"padding": 1}),
    "odd_channels": ((3, 5, 17, 13), 7, 3, {}),
    "pointwise": ((4, 32, 14, 14), 64, 1, {"bias": False}),
    "stride": ((4, 16, 21, 18), 24, 3, {"stride": (2, 3), "padding": (1, 0)}),
    "dilation": ((2, 16, 20, 20), 16, 3, {"dilation": (2, 3), "padding": (2, 3)}),
    "groups": ((4, 32, 14, 14), 32, 3, {"groups": 4, "padding": 1}),
    "depthwise": ((4, 16, 14, 14), 32, 3, {"groups": 16, "padding": 1}),
    "asymmetric_same": ((2, 16, 15, 12), 16, (4, 2), {"padding": "same"}),
    "asymmetric_dilated": ((2, 8, 15, 12), 16, (2, 4), {"padding": "same", "dilation": (3, 1)}),
    "reflect": ((2, 8, 15, 12), 16, 3, {"padding": 1, "padding_mode": "reflect"}),
    "one_output_pixel": ((2, 16, 3, 3), 8, 3, {}),
}


def gradients(module: nn.Module, input: Tensor, seed: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of each parameter."""
    input = input.detach().requires_grad_()
    output = module(input)
    return [
        output,
        *torch.autograd.grad(output, [input, *module.parameters()], seed.to(output)),
    ]


def check(case: str, type_name: str, layout: str, sampling: str, cudnn_flags: SetFlags) -> None:
    dtype, tf32 = TYPES[type_name]
    shape, channels, kernel, keywords = CASES[case]
    cudnn_flags(allow_tf32=tf32)
    theirs = nn.Conv2d(shape[1], channels, kernel, dtype=dtype, device="cuda", **keywords)
    theirs.to(memory_format=LAYOUTS[layout])
    ours = ca.Conv2d(
        shape[1], channels, kernel, dtype=dtype, device="cuda", sampling=sampling, **keywords
    )
    ours.load_state_dict(theirs.state_dict())
    ours.to(memory_format=LAYOUTS[layout])
    exact = nn.Conv2d(shape[1], channels, kernel, dtype=torch.float64, **keywords)
    exact.load_state_dict(theirs.state_dict())

    input = torch.randn(shape).to("cuda", dtype).contiguous(memory_format=LAYOUTS[layout])
    seed = torch.randn(exact(torch.zeros(shape, dtype=torch.float64)).shape).to("cuda", dtype)
    seed = seed.contiguous(memory_format=LAYOUTS[layout])
    expected = gradients(exact, input.cpu().double(), seed.cpu())
    pytorchs = gradients(theirs, input, seed)
    actual = gradients(ours, input, seed)
    names = ["output", "grad_input", *(f"grad_{n}" for n, _ in ours.named_parameters())]
    for name, mine, other, right in zip(names, actual, pytorchs, expected, strict=True):
        assert mine.dtype is dtype
        assert_close(mine, right, tolerance(dtype, tf32), f"{name} of {case}")
        if name == "output":
            assert mine.stride() == other.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("case", CASES)
def test_heuristic_choice(case: str, type_name: str, layout: str, cudnn_flags: SetFlags) -> None:
    check(case, type_name, layout, "heuristic", cudnn_flags)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("case", ["plain", "asymmetric_same"])
def test_timed_choice(case: str, type_name: str, layout: str, cudnn_flags: SetFlags) -> None:
    check(case, type_name, layout, "sample_once", cudnn_flags)


@pytest.mark.parametrize("input_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
def test_mixed_layouts_have_pytorchs_strides(input_layout: str, weight_layout: str) -> None:
    input = torch.randn(2, 8, 9, 7, device="cuda").half()
    weight = torch.randn(16, 8, 3, 3, device="cuda").half()
    input = input.contiguous(memory_format=LAYOUTS[input_layout]).requires_grad_()
    weight = weight.contiguous(memory_format=LAYOUTS[weight_layout]).requires_grad_()
    results = []
    for function in (nn.functional.conv2d, ca.functional.conv2d):
        output = function(input, weight)
        seed = torch.ones_like(output)
        results.append([output, *torch.autograd.grad(output, (input, weight), seed)])
    for theirs, ours in zip(*results, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("name", ["one_dimension", "three_dimensions"])
def test_the_ops_are_generic_in_dimensions(name: str, cudnn_flags: SetFlags) -> None:
    case = OP_CASES[name]
    input, weight, bias, grad_output = case.tensors("cuda", torch.float32, requires_grad=False)
    cudnn_flags(allow_tf32=False)
    exact = [t.cpu().double().requires_grad_() for t in (input, weight, bias)]
    expected = case.plain(*exact)
    grads = torch.autograd.grad(expected, exact[:2], grad_output.cpu().double())
    tail = (*case.geometry, "heuristic")
    assert_close(ops.conv_fprop(input, weight, bias, *tail), expected, 1e-5, "fprop")
    dgrad = ops.conv_dgrad(grad_output, weight, list(case.input_shape), *tail)
    assert_close(dgrad, grads[0], 1e-5, "dgrad")
    wgrad = ops.conv_wgrad(grad_output, input, list(case.weight_shape), *tail)
    assert_close(wgrad, grads[1], 1e-5, "wgrad")


def test_unequal_padding_on_all_sides() -> None:
    """Not reachable through nn.Conv2d: (pre..., post...) of the op itself."""
    input = torch.randn(2, 8, 12, 10, device="cuda", dtype=torch.float64)
    weight = torch.randn(6, 8, 3, 3, device="cuda", dtype=torch.float64)
    output = torch.ops.cudnn_autotune.conv_fprop(
        input, weight, None, [2, 1], [0, 3, 1, 2], [1, 1], 1, "heuristic"
    )
    expected = convolution(
        input.cpu(), weight.cpu(), stride=(2, 1), padding=(0, 3, 1, 2), dilation=(1, 1), groups=1
    )
    assert_close(output, expected, 1e-12)
