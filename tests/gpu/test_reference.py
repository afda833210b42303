"""Every dtype, layout and direction against float64, through the layers that users call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.conv.references import assert_close, convolution, tolerance
from torch import Tensor, nn

import cudnn_autotune as ca

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

# input shape, output channels, kernel, keywords; the class if it is not Conv2d
CASES: dict[str, tuple[Any, ...]] = {
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
    "plain_1d": ((4, 16, 60), 32, 3, {"padding": 1}, "Conv1d"),
    "strided_1d": ((3, 5, 61), 7, 5, {"stride": 3, "dilation": 2}, "Conv1d"),
    "depthwise_1d": ((4, 16, 60), 16, 4, {"padding": "same", "groups": 16}, "Conv1d"),
    "plain_3d": ((2, 16, 9, 10, 11), 24, 3, {"padding": 1}, "Conv3d"),
    "strided_3d": ((2, 5, 9, 10, 11), 7, (3, 2, 1), {"stride": (2, 1, 3)}, "Conv3d"),
    "groups_3d": ((2, 16, 8, 8, 8), 16, 3, {"groups": 4, "dilation": 2}, "Conv3d"),
    "asymmetric_3d": ((2, 8, 7, 8, 9), 16, (4, 3, 2), {"padding": "same"}, "Conv3d"),
    "circular_3d": ((2, 8, 7, 8, 9), 16, 3, {"padding": 1, "padding_mode": "circular"}, "Conv3d"),
    "transposed": ((4, 16, 10, 9), 24, 2, {"stride": 2}, "ConvTranspose2d"),
    "transposed_odd": (
        (3, 5, 9, 8),
        7,
        (3, 4),
        {"stride": (3, 2), "padding": (2, 1), "output_padding": (2, 1), "dilation": (1, 2)},
        "ConvTranspose2d",
    ),
    "transposed_groups": (
        (4, 32, 9, 9),
        16,
        4,
        {"stride": 2, "padding": 1, "groups": 4, "bias": False},
        "ConvTranspose2d",
    ),
    "transposed_depthwise": (
        (4, 16, 9, 9),
        16,
        4,
        {"stride": 2, "padding": 1, "groups": 16},
        "ConvTranspose2d",
    ),
    "transposed_1d": ((4, 16, 30), 8, 5, {"stride": 3, "output_padding": 1}, "ConvTranspose1d"),
    "transposed_3d": (
        (2, 16, 5, 6, 4),
        8,
        3,
        {"stride": 2, "padding": 1, "output_padding": 1},
        "ConvTranspose3d",
    ),
}


def gradients(module: nn.Module, input: Tensor, seed: Tensor) -> list[Tensor]:
    """Output, gradient of the input and of each parameter."""
    input = input.detach().requires_grad_()
    output = module(input)
    return [output, *torch.autograd.grad(output, [input, *module.parameters()], seed.to(output))]


def check(case: str, type_name: str, layout: str, sampling: str, cudnn_flags: SetFlags) -> None:
    dtype, tf32 = TYPES[type_name]
    shape, channels, kernel, keywords, *kind = CASES[case]
    name = kind[0] if kind else "Conv2d"
    theirs_class, ours_class = getattr(nn, name), getattr(ca, name)
    memory_format = LAYOUTS[layout]
    if layout == "channels_last" and len(shape) == 5:
        memory_format = torch.channels_last_3d
    cudnn_flags(allow_tf32=tf32)
    arguments = (shape[1], channels, kernel)
    theirs = theirs_class(*arguments, dtype=dtype, device="cuda", **keywords)
    theirs.to(memory_format=memory_format)
    ours = ours_class(*arguments, dtype=dtype, device="cuda", sampling=sampling, **keywords)
    ours.load_state_dict(theirs.state_dict())
    ours.to(memory_format=memory_format)
    exact = theirs_class(*arguments, dtype=torch.float64, **keywords)
    exact.load_state_dict(theirs.state_dict())

    input = torch.randn(shape).to("cuda", dtype).contiguous(memory_format=memory_format)
    seed = torch.randn(exact(torch.zeros(shape, dtype=torch.float64)).shape).to("cuda", dtype)
    seed = seed.contiguous(memory_format=memory_format)
    expected = gradients(exact, input.cpu().double(), seed.cpu())
    pytorchs = gradients(theirs, input, seed)
    actual = gradients(ours, input, seed)
    names = ["output", "grad_input", *(f"grad_{n}" for n, _ in ours.named_parameters())]
    for name, mine, other, right in zip(names, actual, pytorchs, expected, strict=True):
        assert mine.dtype is dtype
        assert_close(mine, right, tolerance(dtype, tf32), f"{name} of {case}")
        if name == "output":
            assert mine.stride() == other.stride()
    assert ca.choices(), "nothing went through the search"


WITH_LAYOUTS = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS
    if (layout, len(CASES[case][0])) != ("channels_last", 3)  # there is no such layout
]


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("case", "layout"), WITH_LAYOUTS)
def test_heuristic_choice(case: str, type_name: str, layout: str, cudnn_flags: SetFlags) -> None:
    check(case, type_name, layout, "heuristic", cudnn_flags)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (case, layout)
        for case, layout in WITH_LAYOUTS
        if case
        in ("plain", "asymmetric_same", "plain_1d", "plain_3d", "transposed", "transposed_3d")
    ],
)
def test_timed_choice(case: str, type_name: str, layout: str, cudnn_flags: SetFlags) -> None:
    check(case, type_name, layout, "sample_once", cudnn_flags)


@pytest.mark.parametrize("input_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("name", ["conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"])
def test_mixed_layouts_have_pytorchs_strides(
    name: str, input_layout: str, weight_layout: str
) -> None:
    dims = int(name[-2])
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    input = torch.randn((2, 8, 9, 7, 5)[: dims + 2], device="cuda").half()
    weight = torch.randn((8, 8, 3, 3, 3)[: dims + 2], device="cuda").half()
    if input_layout == "channels_last":
        input = input.contiguous(memory_format=last)
    if weight_layout == "channels_last":
        weight = weight.contiguous(memory_format=last)
    input.requires_grad_()
    weight.requires_grad_()
    results = []
    for module in (nn.functional, ca.functional):
        output = getattr(module, name)(input, weight)
        seed = torch.ones_like(output)
        results.append([output, *torch.autograd.grad(output, (input, weight), seed)])
    for theirs, ours in zip(*results, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-1)


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
