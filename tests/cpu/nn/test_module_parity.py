"""On the CPU each module and function is PyTorch's, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from support.conv.references import error_of
from torch import Tensor, nn

import cudnn_autotune as ca

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# the arguments of nn.Conv2d, or those of another class and its name
CASES: dict[str, tuple[Any, ...]] = {
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
for _dims in (1, 3):
    for _name in ("plain", "stride", "dilation", "depthwise", "same", "reflect", "circular"):
        if (_dims, _name) != (3, "reflect"):
            CASES[f"{_name}_{_dims}d"] = (*CASES[_name], f"Conv{_dims}d")
    CASES[f"same_even_{_dims}d"] = ((4, 6, 4), {"padding": "same"}, f"Conv{_dims}d")
for _dims in (1, 2, 3):
    for _name, _keywords in {
        "plain": {},
        "no_bias": {"bias": False},
        "stride": {"stride": 2, "padding": 1},
        "output_padding": {"stride": 3, "output_padding": 2},
        "output_padding_of_dilation": {"dilation": 3, "output_padding": 2},
        "groups": {"stride": 2, "groups": 2, "dilation": 2},
    }.items():
        CASES[f"transposed_{_name}_{_dims}d"] = ((4, 6, 3), _keywords, f"ConvTranspose{_dims}d")

INPUTS = {
    "batch": (2, 4, 9, 8, 7),
    "one": (1, 4, 9, 8, 7),
    "unbatched": (4, 9, 8, 7),
    "zero_batch": (0, 4, 9, 8, 7),
}


def twins(
    arguments: tuple[Any, ...], keywords: dict[str, Any], cls: str = "Conv2d"
) -> tuple[nn.Module, Any]:
    theirs = getattr(nn, cls)(*arguments, **keywords)
    ours = getattr(ca, cls)(*arguments, **keywords)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def input_of(module: nn.Module, shape: str = "batch") -> Tensor:
    dims = len(module.kernel_size)
    return torch.randn(INPUTS[shape][: len(INPUTS[shape]) - 3 + dims])


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
        assert torch.equal(actual, expected)
        assert actual.stride() == expected.stride()
        assert actual.dtype == expected.dtype


@pytest.mark.basic(60)
@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case: str, shape: str) -> None:
    theirs, ours = twins(*CASES[case])
    input = input_of(theirs, shape)
    try:
        theirs(input)
    except RuntimeError as refusal:  # F.pad takes no empty batch in some modes
        with pytest.raises(RuntimeError, match=re.escape(str(refusal))):
            ours(input)
        assert shape == "zero_batch"
        return
    assert_identical(theirs, ours, input)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "case", ["plain", "groups", "same_even", "transposed_groups_2d", "transposed_stride_3d"]
)
def test_dtypes(case: str, dtype: torch.dtype) -> None:
    theirs, ours = (module.to(dtype) for module in twins(*CASES[case]))
    assert_identical(theirs, ours, input_of(theirs).to(dtype))


@pytest.mark.parametrize("cls", ["Conv2d", "ConvTranspose2d"])
def test_complex(cls: str) -> None:
    theirs, ours = twins((4, 6, 3), {"dtype": torch.complex64}, cls)
    input = torch.randn(2, 4, 9, 8, dtype=torch.complex64)
    assert torch.equal(ours(input), theirs(input))


@pytest.mark.parametrize("cls", ["Conv2d", "ConvTranspose2d", "Conv3d", "ConvTranspose3d"])
@pytest.mark.parametrize("layout", ["input", "weight", "both"])
def test_channels_last(layout: str, cls: str) -> None:
    theirs, ours = twins((4, 6, 3), {"padding": 1}, cls)
    input = input_of(theirs)
    channels_last = CHANNELS_LAST[input.dim()]
    if layout != "weight":
        input = input.to(memory_format=channels_last)
    if layout != "input":
        theirs, ours = (m.to(memory_format=channels_last) for m in (theirs, ours))
    assert_identical(theirs, ours, input)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("with_channels", [False, True])
def test_output_size(dims: int, unbatched: bool, with_channels: bool) -> None:
    theirs, ours = twins((4, 6, 3), {"stride": 3, "padding": 1}, f"ConvTranspose{dims}d")
    input = input_of(theirs, "unbatched" if unbatched else "batch")
    for more in range(3):
        size = [3 * (length - 1) + 1 + more for length in input.shape[-dims:]]
        if with_channels:
            size = [6, *size] if unbatched else [2, 6, *size]
        output = ours(input, output_size=size)
        assert torch.equal(output, theirs(input, size))
        assert list(output.shape[-dims:]) == size[-dims:]
    for size in ([3 * length + 9 for length in input.shape[-dims:]], [5] * 5):
        assert error_of(ours, input, size) == error_of(theirs, input, size)


def test_non_contiguous_input_and_weight() -> None:
    theirs, ours = twins((4, 6, 3), {})
    with torch.no_grad():
        weight = torch.randn(3, 3, 4, 6).permute(3, 2, 0, 1)
        for module in (theirs, ours):
            module.weight = nn.Parameter(weight)
    assert not ours.weight.is_contiguous()
    assert_identical(theirs, ours, torch.randn(2, 4, 18, 8)[:, :, ::2])


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
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
def test_what_pytorch_takes_for_an_integer(name: str, argument: str, value: Any) -> None:
    """The same result, or an error of the same type."""
    channels = (4, 3) if name == "conv_transpose2d" else (6, 2 if argument == "groups" else 4)
    input, weight = torch.randn(2, 4, 9, 8), torch.randn(*channels, 3, 3)
    results: list[Tensor | type[BaseException]] = []
    for function in (getattr(torch.nn.functional, name), getattr(ca.functional, name)):
        try:
            results.append(function(input, weight, **{argument: value}))
        except (TypeError, RuntimeError) as error:
            results.append(type(error))
    if isinstance(results[0], Tensor):
        assert isinstance(results[1], Tensor)
        assert torch.equal(results[1], results[0])
    else:
        assert results[1] is results[0]
