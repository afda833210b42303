"""``fuse`` on a GPU: what it makes is right, is measured, and is captured."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fused_cases import FUNCTIONS
from references import assert_close, tolerance
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.engines.problem import ACTIVATIONS

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 128, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(128)
        self.second = nn.Conv2d(128, 64, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(64)
        self.activation = activation
        for norm in (self.norm, self.norm2):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.running_mean, std=0.1)  # type: ignore[arg-type]
            nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        return self.activation(self.norm2(self.second(y)) + x)


def block(
    dtype: torch.dtype, layout: torch.memory_format, activation: str
) -> tuple[nn.Module, Tensor, Tensor]:
    """A block, an input, and the output in float64."""
    torch.manual_seed(0)
    model = Block(FUNCTIONS[activation]).eval().cuda().to(dtype)
    input = torch.randn(8, 64, 28, 28, device="cuda").to(dtype)
    with torch.no_grad():
        expected = copy.deepcopy(model).double().cpu()(input.double().cpu())
    return model.to(memory_format=layout), input.to(memory_format=layout), expected


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_model_is_right(
    activation: str, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    model, input, expected = block(dtype, layout, activation)
    fused = ca.fuse(model, input, sampling="heuristic", groups="always")
    assert not fused.unfused
    with torch.no_grad():
        output = fused(input)
    # As PyTorch's convolutions do, those in float64 give contiguous outputs.
    kept = torch.contiguous_format if dtype is torch.float64 else layout
    assert output.is_contiguous(memory_format=kept)
    assert_close(output, expected, 2 * tolerance(dtype, True, activation))


def test_a_group_is_fused_if_it_is_measured_to_be_faster() -> None:
    model, input, expected = block(torch.float16, torch.channels_last, "silu")
    fused = ca.fuse(model, input, sampling="race")
    with torch.no_grad():
        assert_close(fused(input), expected, 2 * tolerance(torch.float16))
    assert len(fused.groups) == 2
    for group in fused.groups:
        one, several = map(float, re.findall(r"([\d.]+) us", group.reason))
        assert group.is_fused == (one < several) or one == several


def test_what_is_not_fused_is_tuned() -> None:
    model, input, expected = block(torch.float16, torch.channels_last, "relu")
    fused = ca.fuse(model, input, sampling="heuristic", groups="never")
    with torch.no_grad():
        assert_close(fused(input), expected, 2 * tolerance(torch.float16))
    assert len(fused.unfused) == 2
    problems = [choice.problem for choice in ca.choices()]
    assert len(problems) == 2
    assert not any(problem.activation or problem.residual for problem in problems)
    assert all(problem.bias for problem in problems), "that of the folded batch norm"


def test_a_fused_model_is_captured_in_a_cuda_graph() -> None:
    model, input, expected = block(torch.float16, torch.channels_last, "relu")
    fused = ca.fuse(model, input, sampling="heuristic", groups="always")
    with torch.no_grad():
        fused(input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = fused(input)
        graph.replay()
    assert_close(output, expected, 2 * tolerance(torch.float16))


def test_a_dynamic_batch() -> None:
    model, input, _ = block(torch.float16, torch.channels_last, "relu")
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    fused = ca.fuse(model, input, sampling="heuristic", dynamic_shapes=dynamic, groups="always")
    with torch.no_grad():
        for batch in (1, 3, 16):
            other = torch.randn(batch, 64, 28, 28, device="cuda", dtype=torch.float16)
            other = other.to(memory_format=torch.channels_last)
            torch.testing.assert_close(fused(other), model(other), rtol=2e-2, atol=2e-2)
