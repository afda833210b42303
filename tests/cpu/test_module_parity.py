"""On the CPU ``ca.Conv2d`` is ``nn.Conv2d``, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cudnn_autotune as ca

CASES: dict[str, tuple[tuple[int, int, Any], dict[str, Any]]] = {
    "plain": ((4, 6, 3), {}),
    "no_bias": ((4, 6, 3), {"bias": False}),
    "stride": ((4, 6, 3), {"stride": 2}),
    "stride_pair": ((4, 6, (3, 2)), {"stride": (2, 1), "padding": (1, 0)}),
    "dilation": ((4, 6, 3), {"dilation": 2, "padding": 2}),
    "groups": ((4, 6, 3), {"groups": 2}),
    "depthwise": ((4, 8, 3), {"groups": 4, "padding": 1}),
    "pointwise": ((4, 6, 1), {}),
    "same": ((4, 6, 3), {"padding": "same"}),
    "same_even": ((4, 6, (4, 2)), {"padding": "same", "dilation": (1, 3)}),
    "valid": ((4, 6, 3), {"padding": "valid"}),
    "zeros": ((4, 6, 3), {"padding": 1, "padding_mode": "zeros"}),
    "reflect": ((4, 6, 3), {"padding": 1, "padding_mode": "reflect"}),
    "replicate": ((4, 6, 3), {"padding": (2, 1), "padding_mode": "replicate"}),
    "circular": ((4, 6, 3), {"padding": 1, "padding_mode": "circular"}),
    "same_reflect": ((4, 6, 4), {"padding": "same", "padding_mode": "reflect"}),
}

INPUTS = {
    "batch": (2, 4, 9, 8),
    "one": (1, 4, 9, 8),
    "unbatched": (4, 9, 8),
    "zero_batch": (0, 4, 9, 8),
}


def twins(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[nn.Conv2d, ca.Conv2d]:
    theirs = nn.Conv2d(*arguments, **keywords)
    ours = ca.Conv2d(*arguments, **keywords)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(module: nn.Module, input: Tensor) -> list[Tensor | None]:
    """Output, gradient of the input, gradients of the parameters."""
    input = input.detach().requires_grad_()
    output = module(input)
    torch.manual_seed(1)
    output.backward(torch.randn_like(output))
    return [output, input.grad, *(p.grad for p in module.parameters())]


def assert_identical(theirs: nn.Module, ours: nn.Module, input: Tensor) -> None:
    for expected, actual in zip(run(theirs, input), run(ours, input), strict=True):
        if expected is None:
            assert actual is None
            continue
        assert actual is not None
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
        assert actual.dtype == expected.dtype


@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case: str, shape: str) -> None:
    theirs, ours = twins(*CASES[case])
    input = torch.randn(INPUTS[shape])
    try:
        theirs(input)
    except RuntimeError as refusal:  # F.pad takes no empty batch in some modes
        with pytest.raises(RuntimeError, match=re.escape(str(refusal))):
            ours(input)
        assert shape == "zero_batch"
        return
    assert_identical(theirs, ours, input)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", ["plain", "groups", "same_even"])
def test_dtypes(case: str, dtype: torch.dtype) -> None:
    theirs, ours = (module.to(dtype) for module in twins(*CASES[case]))
    assert_identical(theirs, ours, torch.randn(2, 4, 9, 8, dtype=dtype))


def test_complex() -> None:
    theirs, ours = twins((4, 6, 3), {"dtype": torch.complex64})
    input = torch.randn(2, 4, 9, 8, dtype=torch.complex64)
    assert torch.equal(ours(input), theirs(input))


@pytest.mark.parametrize("layout", ["input", "weight", "both"])
def test_channels_last(layout: str) -> None:
    theirs, ours = twins((4, 6, 3), {"padding": 1})
    input = torch.randn(2, 4, 9, 8)
    if layout != "weight":
        input = input.to(memory_format=torch.channels_last)
    if layout != "input":
        theirs, ours = (m.to(memory_format=torch.channels_last) for m in (theirs, ours))
    assert_identical(theirs, ours, input)


def test_non_contiguous_input_and_weight() -> None:
    theirs, ours = twins((4, 6, 3), {})
    with torch.no_grad():
        weight = torch.randn(3, 3, 4, 6).permute(3, 2, 0, 1)
        for module in (theirs, ours):
            module.weight = nn.Parameter(weight)
    assert not ours.weight.is_contiguous()
    assert_identical(theirs, ours, torch.randn(2, 4, 18, 8)[:, :, ::2])


@pytest.mark.parametrize("frozen", ["weight", "bias", "all"])
def test_frozen_parameters(frozen: str) -> None:
    theirs, ours = twins((4, 6, 3), {})
    for module in (theirs, ours):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name != frozen and frozen != "all")
    assert_identical(theirs, ours, torch.randn(2, 4, 9, 8))


def test_autocast_on_the_cpu() -> None:
    theirs, ours = twins((4, 6, 3), {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_identical(theirs, ours, torch.randn(2, 4, 9, 8))
        assert ours(torch.randn(2, 4, 9, 8)).dtype is torch.bfloat16


def test_the_functional_is_pytorchs() -> None:
    input, weight, bias = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 3), torch.randn(6)
    for arguments in ((bias,), (None, 2), (bias, (2, 1), (1, 0), 2, 2)):
        groups = arguments[4] if len(arguments) == 5 else 2
        arguments = (*arguments, *(1, 0, 1)[len(arguments) - 1 :], groups)[:5]
        expected = torch.nn.functional.conv2d(input, weight, *arguments)
        assert torch.equal(ca.functional.conv2d(input, weight, *arguments), expected)


@pytest.mark.parametrize("argument", ["stride", "padding", "dilation", "groups"])
@pytest.mark.parametrize(
    "value",
    [
        np.int64(2),
        np.uint8(2),
        torch.tensor(2),
        torch.tensor([2]),
        (np.int64(2), np.int32(1)),
        [torch.tensor(2), 1],
        np.array([2, 2]),
        torch.tensor([2, 2]),
        np.float64(2),
        2.0,
        None,
        "two",
    ],
    ids=repr,
)
def test_what_pytorch_takes_for_an_integer(argument: str, value: Any) -> None:
    """The same result, or an error of the same type."""
    input, weight = torch.randn(2, 4, 9, 8), torch.randn(6, 2 if argument == "groups" else 4, 3, 3)
    results: list[Tensor | type[BaseException]] = []
    for function in (torch.nn.functional.conv2d, ca.functional.conv2d):
        try:
            results.append(function(input, weight, **{argument: value}))
        except (TypeError, RuntimeError) as error:
            results.append(type(error))
    if isinstance(results[0], Tensor):
        assert isinstance(results[1], Tensor)
        assert torch.equal(results[1], results[0])
    else:
        assert results[1] is results[0]


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ((5, 6, 3), {"groups": 2}),
        ((4, 5, 3), {"groups": 2}),
        ((4, 6, 3), {"groups": 0}),
        ((4, 6, 3), {"padding": "full"}),
        ((4, 6, 3), {"padding": "same", "stride": 2}),
        ((4, 6, 3), {"padding_mode": "mirror"}),
        ((4, 6), {}),
        ((4, 6, 3), {"no_such_argument": 1}),
    ],
    ids=str,
)
def test_constructor_errors_are_pytorchs(
    arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    errors = []
    for cls in (nn.Conv2d, ca.Conv2d):
        with pytest.raises((ValueError, TypeError)) as error:
            cls(*arguments, **keywords)
        errors.append(error)
    theirs, ours = errors
    assert ours.type is theirs.type
    assert str(ours.value).replace("cudnn_autotune", "") == str(theirs.value)


@pytest.mark.parametrize(
    ("input", "weight"),
    [
        ((2, 5, 9, 8), (6, 4, 3, 3)),
        ((9, 8), (6, 4, 3, 3)),
        ((2, 4, 2, 2), (6, 4, 3, 3)),
        ((2, 4, 9, 8), (6, 4, 3)),
        ((1, 2, 4, 9, 8), (6, 4, 3, 3)),
    ],
    ids=str,
)
def test_shape_errors_are_pytorchs(input: tuple[int, ...], weight: tuple[int, ...]) -> None:
    messages = []
    for function in (torch.nn.functional.conv2d, ca.functional.conv2d):
        with pytest.raises(RuntimeError) as error:
            function(torch.randn(input), torch.randn(weight))
        messages.append(str(error.value))
    assert messages[0] == messages[1]
