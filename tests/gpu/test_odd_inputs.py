"""Inputs that are strided, empty, misaligned, ambiguous in layout, or very large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.conv.references import assert_close
from support.conv.training_steps import assert_same_step, twin_layers
from torch import Tensor, nn

import cudnn_autotune as ca


@pytest.fixture(autouse=True)
def full_precision(cudnn_flags: Callable[..., None]) -> None:
    cudnn_flags(allow_tf32=False)


ODD_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda t: t[:1].expand(4, -1, -1, -1),
    "offset": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t),
    "one_with_odd_strides": lambda t: t[:1].as_strided((1, 8, 11, 10), (7, 110, 10, 1)),
    "one_channels_last_strides": lambda t: t[:1].as_strided((1, 8, 11, 10), (1, 1, 80, 8)),
    "unbatched": lambda t: t[0],
    "zero_batch": lambda t: t[:0],
    "negated": lambda t: torch._neg_view(t),
}


@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
@pytest.mark.parametrize("name", ODD_INPUTS)
def test_odd_inputs(name: str, kind: str) -> None:
    ca.set_sampling("heuristic")
    input = torch.randn(4, 8, 11, 10, device="cuda")
    assert_same_step(*twin_layers(8, 12, 3, padding=1, kind=kind), ODD_INPUTS[name](input))


@pytest.mark.parametrize("kind", ["Conv1d", "Conv3d", "ConvTranspose1d", "ConvTranspose3d"])
@pytest.mark.parametrize("size", ["unbatched", "zero_batch", "one", "strided"])
def test_odd_inputs_of_other_dimensions(size: str, kind: str) -> None:
    ca.set_sampling("heuristic")
    input = torch.randn((4, 8, 11, 10, 9)[: 2 + int(kind[-2])], device="cuda")
    arranged = {
        "unbatched": input[0],
        "zero_batch": input[:0],
        "one": input[:1],
        "strided": input[::2, :, ::2],
    }
    assert_same_step(*twin_layers(8, 12, 3, padding=1, kind=kind), arranged[size])


def test_output_padding_of_a_stride_or_more_is_pytorchs() -> None:
    """It is refused unless the dilation is larger, and is no gradient of a convolution."""
    ca.set_sampling("heuristic")
    for layout in (torch.contiguous_format, torch.channels_last):
        layers = twin_layers(
            8, 12, 3, stride=2, dilation=4, output_padding=3, kind="ConvTranspose2d"
        )
        input = torch.randn(4, 8, 11, 10, device="cuda").contiguous(memory_format=layout)
        with torch.no_grad():
            theirs, ours = (layer(input) for layer in layers)
        assert ours.stride() == theirs.stride()
        assert_close(ours, theirs, 1e-5)
        assert_same_step(*layers, input)
    assert not ca.choices()
    # A call, and the forward and backward of a step, for each layout.
    assert sum(ca.fallbacks().values()) == 6


def test_what_cudnn_cannot_count_is_pytorchs() -> None:
    """2**32 + 1 is 1 in cuDNN's 32 bits, and its output would be written out of bounds. (PyTorch
    counts in 32 bits too, so that its results are not looked at: only that they are its.)"""
    input = torch.randn(3, 5, 8, 8, device="cuda")
    weight = torch.randn(7, 5, 1, 1, device="cuda")
    try:
        output = ca.functional.conv2d(input, weight, stride=2**32 + 1, sampling="heuristic")
    except RuntimeError:
        pass  # refused in PyTorch's words
    else:
        assert output.shape == (3, 7, 1, 1)
    assert any("2**31" in reason for reason in ca.fallbacks())
    assert not ca.choices()


def test_the_dilation_of_one_element_says_nothing() -> None:
    """cuDNN 9.19 divided by zero in the gradient of the input."""
    ca.set_sampling("heuristic")
    theirs, ours = twin_layers(16, 16, 1, stride=3, padding=2)
    ours.dilation = (2**31 - 1, 2**31 - 1)
    assert_same_step(theirs, ours, torch.randn(8, 16, 8, 32, device="cuda"))
    assert {c.problem.dilation for c in ca.choices()} == {(1, 1)}


def test_one_channel_is_ambiguous_about_layout() -> None:
    ca.set_sampling("heuristic")
    for shape in ((4, 1, 9, 9), (4, 6, 1, 1), (1, 1, 5, 5)):
        for layout in (torch.contiguous_format, torch.channels_last):
            theirs, ours = twin_layers(shape[1], 4, 1)
            theirs.to(memory_format=layout)
            ours.to(memory_format=layout)
            sample = torch.randn(shape, device="cuda").contiguous(memory_format=layout)
            assert_same_step(theirs, ours, sample)


def test_misaligned_operands_make_their_own_choice() -> None:
    """An engine for aligned addresses must not run on others: alignment is part of the key."""
    half = torch.randn(4, 8, 11, 10, device="cuda").half()
    weight = torch.randn(12, 8, 3, 3, device="cuda").half()
    shifted = torch.empty(half.numel() + 1, device="cuda", dtype=torch.half)[1:].view_as(half)
    shifted.copy_(half)
    aligned = ca.functional.conv2d(half, weight, sampling="sample_once")
    assert_close(ca.functional.conv2d(shifted, weight, sampling="sample_once"), aligned, 4e-3)
    assert len(ca.choices()) == 2


def test_64_bit_indexing() -> None:
    needed = 3 * (1 << 31)  # bytes: an input of 2**31 + halves, the output beside it, and room
    if torch.cuda.mem_get_info()[0] < 2 * needed:
        pytest.skip(f"needs {2 * needed >> 30} GiB of free GPU memory")
    weight = torch.randn(1, 8, 3, 3, device="cuda").half()
    big = torch.zeros(2, 8, 1 << 14, (1 << 13) + 2, device="cuda", dtype=torch.half)
    assert big.numel() > 1 << 31
    corner = torch.randn(8, 6, 6, device="cuda").half()
    big[-1, :, -6:, -6:] = corner
    output = ca.functional.conv2d(big, weight)
    right = nn.functional.conv2d(corner.double().cpu(), weight.double().cpu())
    assert_close(output[-1, :, -4:, -4:], right, 2e-3)
    del big, output
    torch.cuda.empty_cache()
