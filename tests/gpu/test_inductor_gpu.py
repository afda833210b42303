"""Compiled by Inductor, a model with our layers is what it is with PyTorch's, engines aside.

The code that Inductor generates is counted: launches of its own kernels and calls of convolutions.
A layout that is decided otherwise, or a batch norm that is not folded, shows as more of them.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_autotune as ca

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("fresh_compiler")]

LAYOUTS = [torch.contiguous_format, torch.channels_last]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.expand = nn.Conv2d(32, 64, 1)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.project = nn.Conv2d(64, 32, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.same = nn.Conv2d(32, 16, 4, padding="same", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = x + self.norm2(self.project(self.depthwise(self.expand(x)).relu()))
        return self.same(x).mean((2, 3))


def pair(layout: torch.memory_format, size: int = 64) -> tuple[nn.Module, nn.Module, Tensor]:
    """The same model with PyTorch's layers and with ours, and an input of size x size pixels."""
    torch.manual_seed(0)
    theirs = Block().cuda().to(memory_format=layout)
    ours = copy.deepcopy(theirs)
    for module in ours.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = ca.Conv2d
            module.sampling = "heuristic"
    return theirs, ours, torch.randn(8, 3, size, size, device="cuda").to(memory_format=layout)


def counts(codes: list[str]) -> tuple[int, int]:
    """Launches of generated kernels, and convolutions, of either kind."""
    code = "\n".join(codes)
    forward = re.findall(r"extern_kernels\.convolution\(|conv_fprop\.default\(", code)
    backward = re.findall(r"convolution_backward\.default\(", code)
    ours = re.findall(r"conv_[dw]grad\.default\(", code)
    assert not (backward and ours)
    return len(re.findall(r"triton_\w+\.run\(", code)), len(forward)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("freezing", [False, True])
def test_inference(layout: torch.memory_format, freezing: bool) -> None:
    theirs, ours, input = pair(layout)
    found = []
    with torch.no_grad(), torch._inductor.config.patch(freezing=freezing):
        expected = theirs.double().eval()(input.double()).float()
        theirs.float()
        for model in (theirs, ours):
            output, codes = run_and_get_code(torch.compile(model.eval(), fullgraph=True), input)
            torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)
            found.append(counts(codes))
            assert ("conv_fprop" in codes[0]) == (model is ours)
            assert "mark_input.default(" not in codes[0]
            assert "assumed to be not aligned" not in codes[0]
    assert found[0][1] == 5
    assert found[1] == found[0]


@pytest.mark.parametrize("size", [64, 66])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training(layout: torch.memory_format, size: int) -> None:
    """Inductor pads strides of what is saved if a size is odd: images of 33 x 33 after the stem."""
    theirs, ours, input = pair(layout, size)
    found, grads = [], []
    for model in (theirs, ours):
        compiled = torch.compile(model, fullgraph=True)
        _, codes = run_fw_bw_and_get_code(lambda compiled=compiled: compiled(input))
        found.append(counts(codes))
        grads.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    (their_kernels, their_convolutions), (our_kernels, our_convolutions) = found
    assert our_convolutions == their_convolutions == 5
    assert our_kernels <= their_kernels


@pytest.mark.parametrize("max_autotune", [False, True])
def test_cpp_wrapper(max_autotune: bool) -> None:
    theirs, ours, input = pair(torch.channels_last)
    options = {"cpp_wrapper": True, "max_autotune": max_autotune}
    compiled = torch.compile(ours.eval(), options=options, fullgraph=True)
    with torch.no_grad():
        expected = theirs.eval()(input)
        torch.testing.assert_close(compiled(input), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["1x1", "grouped", "depthwise", "transposed"])
@pytest.mark.parametrize("backend", ["inductor", "cudnn_autotune"])
def test_results_in_float64_have_the_strides_that_are_claimed(
    backend: str, kind: str, layout: torch.memory_format, train: bool
) -> None:
    """Neither cuDNN nor the operators compute in channels_last in float64."""
    layers: dict[str, Any] = {
        "1x1": lambda layers: layers.Conv2d(8, 8, 1),
        "grouped": lambda layers: layers.Conv2d(8, 8, 3, padding=1, groups=2),
        "depthwise": lambda layers: layers.Conv2d(8, 8, 3, padding=1, groups=8),
        "transposed": lambda layers: layers.ConvTranspose2d(8, 8, 3, groups=2, stride=2),
    }
    found = []
    options = {"compare": False, "fuse": "always"} if backend == "cudnn_autotune" else None
    for module in (nn, ca):
        torch.manual_seed(0)
        layer = layers[kind](module).cuda().double().to(memory_format=layout)
        x = torch.randn(2, 8, 6, 7, dtype=torch.float64, device="cuda", requires_grad=train)
        given = x.to(memory_format=layout)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = layer(mode.from_tensor(given.detach()))
        torch._dynamo.reset()
        for run in (layer, torch.compile(layer, backend=backend, options=options)):
            layer.zero_grad()
            with torch.set_grad_enabled(train):
                y = run(given)
                if train:
                    (of_input,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
                    y.square().sum().backward()
                    found.append([y, of_input, layer.weight.grad, layer.bias.grad])
                else:
                    found.append([y])
            assert y.stride() == fake.stride()
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
