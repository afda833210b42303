"""Outputs and gradients have the strides that PyTorch gives them on CUDA, also where a size of 1
leaves them open.

Gradients are brought into these layouts on any device, so they are tested without a GPU, next to
what ATen does, written down step by step; tests/gpu/test_layouts_gpu.py asks PyTorch itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.conv import odd_layouts
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_autotune as ca
from cudnn_autotune.compile import fake

pytestmark = pytest.mark.search

CASES = 300


@pytest.fixture(autouse=True)
def disabled() -> Iterator[None]:
    yield
    ca.disable()


@pytest.mark.parametrize("way", ["functions", "enable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.usefixtures("on_cpu")
def test_gradients(way: str, dtype: torch.dtype) -> None:
    differ = {}
    for case in odd_layouts.draw(CASES, seed=0):
        case = case.to("cpu", dtype)
        output, right = case.step()
        if way == "enable":
            with ca.enable("heuristic"):
                _, found = case.step()
        else:
            _, found = case.step(ca.functional)
        _, of_input, of_weight = odd_layouts.strides_on_cuda(case, output.shape)
        expected = [
            s for s, is_wanted in zip((of_input, of_weight), case.wanted, strict=True) if is_wanted
        ]
        strides = [gradient.stride() for gradient in found[: len(expected)]]
        if strides != expected:
            differ[case.name] = (strides, expected)
        for ours, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not differ


def test_the_fake_kernels_outputs() -> None:
    """They promise the strides of the kernels for CUDA."""
    differ = {}
    for case in odd_layouts.draw(CASES, seed=1):
        output = case.step()[0]
        expected, _, _ = odd_layouts.strides_on_cuda(case, output.shape)
        n = case.weight.dim() - 2
        with FakeTensorMode():
            x, w = (
                torch.empty_strided(t.shape, t.stride(), device="cuda")
                for t in (case.input, case.weight)
            )
            geometry = ([case.keywords["stride"]] * n, list(case.keywords["padding"]))
            groups = case.keywords["groups"]
            if "transpose" in case.function:
                function = torch.ops.cudnn_autotune.conv_transpose
                found = function(x, w, None, *geometry, [0] * n, [1] * n, groups)
            else:
                function = torch.ops.cudnn_autotune.conv_fprop
                found = function(x, w, None, *geometry, [1] * n, groups)
        assert found.shape == output.shape
        if found.stride() != expected:
            differ[case.name] = (found.stride(), expected)
    assert not differ


def test_the_layout_of_a_convolution_is_atens() -> None:
    """ATen tells which layout it would choose for cuDNN."""
    cudnn = torch._C._ConvBackend.Cudnn
    seen = set()
    for case in odd_layouts.draw(CASES, seed=2):
        x, w = case.input, case.weight
        if w.dim() == 3:
            image = x.contiguous().unsqueeze(2), w.unsqueeze(2)
            expected = torch._C._conv_determine_backend_memory_format(*image, cudnn)
            found = fake.is_image_of_height_1(x, w, pads=False)
            assert found == (expected == torch.channels_last), case.name
        else:
            expected = torch._C._conv_determine_backend_memory_format(x, w, cudnn)
            assert fake.conv_memory_format(x, w) == expected, case.name
        seen.add((w.dim(), expected))
    assert len(seen) == 6, "both layouts, in one to three dimensions"


def test_padding_on_one_side_is_that_of_a_contiguous_input() -> None:
    """PyTorch pads the input first, which leaves it contiguous."""
    with FakeTensorMode():
        x = torch.empty_strided((8, 1, 64), (64, 1, 1), device="cuda")
        w = torch.empty((16, 1, 4), device="cuda")
        function = torch.ops.cudnn_autotune.conv_fprop
        assert function(x, w, None, [1], [1, 2], [1], 1).stride() == (16 * 64, 64, 1)
        assert function(x, w, None, [1], [2], [1], 1).stride() == (16 * 65, 1, 16)
