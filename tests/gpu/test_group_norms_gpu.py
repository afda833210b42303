"""Group norms on a GPU: the kernels against float64, and what computes a model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.norms.measuring import planned
from cudnn_autotune.norms.plan import FORMS, Form

DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SHAPES = {
    "one group, odd length": ((8, 128, 3999), 1),
    "one image": ((1, 256, 64, 64), 32),
    "video": ((1, 64, 5, 36, 40), 32),
    "a group is a channel": ((4, 48, 30, 30), 48),
    "short channels": ((64, 96, 7), 8),
    "no place": ((256, 64), 4),
    "larger than what is kept": ((2, 64, 512, 512), 2),
}


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(shape, generator=generator) + 1
    weight, bias = (torch.randn(shape[1], generator=generator) for _ in range(2))
    return x.to("cuda", dtype), weight.to("cuda", dtype), bias.to("cuda", dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels(name: str, dtype: torch.dtype, form: Form) -> None:
    shape, groups = SHAPES[name]
    x, weight, bias = operands(shape, dtype)
    expected = F.group_norm(x.double(), groups, weight.double(), bias.double(), 1e-3)
    var, mean = torch.var_mean(x.double().view(shape[0], groups, -1), -1, correction=0)
    with planned(form, False):
        for _ in range(3):  # counters are as the launch before left them
            output, statistics = torch.ops.cudnn_autotune.group_norm(x, weight, bias, groups, 1e-3)
    assert relative_error(output, expected) <= DTYPES[dtype]
    assert relative_error(statistics[0], mean) <= 1e-5
    assert relative_error(statistics[1], (var + 1e-3).rsqrt()) <= 1e-5


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_hardly_aligned(offset: int) -> None:
    values = torch.randn(4 * 32 * 50 + offset, device="cuda", dtype=torch.float16)
    x = values[offset:].view(4, 32, 50)
    output, _ = torch.ops.cudnn_autotune.group_norm(x, None, None, 4, 1e-5)
    assert relative_error(output, F.group_norm(x.double(), 4)) <= 2e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(16, 32, 3, padding=1), nn.Conv1d(32, 16, 3, padding=1)
        self.norm, self.norm2 = nn.GroupNorm(1, 32), nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.first(x)))
        return x + self.norm2(self.second(y))


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    output = model(x)
    output.float().square().sum().backward()
    assert x.grad is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [output.detach(), x.grad, *(one.clone() for one in gradients)]


@pytest.mark.parametrize("fastest", ["ours", "pytorch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_s_outputs_and_gradients(
    seems_fastest: Callable[[str], None], fastest: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Block().cuda()
    x = torch.randn(4, 16, 301, device="cuda")
    exact = step(model.double(), x.double())
    model.to(dtype)
    pytorch = step(model, x.to(dtype))
    seems_fastest(fastest)
    ca.convert(model)
    with ca.flags(budget_ms=50):
        for _ in range(2):
            found = step(model, x.to(dtype))
    assert [one.is_served for one in ca.norm_choices()] == [fastest == "ours"] * 2
    for actual, by_pytorch, wanted in zip(found, pytorch, exact, strict=True):
        allowed = 2 * relative_error(by_pytorch, wanted) + {torch.float32: 1e-5}.get(dtype, 1e-2)
        assert relative_error(actual, wanted) <= allowed


def test_in_a_cuda_graph(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    x, weight, bias = operands((4, 64, 40, 40), torch.float16)
    with ca.enable(), torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing is known yet: PyTorch's
            early = F.group_norm(x, 8, weight, bias)
        assert not ca.norm_choices()
        expected = F.group_norm(x, 8, weight, bias)
        later = torch.cuda.CUDAGraph()
        with torch.cuda.graph(later):
            output = F.group_norm(x, 8, weight, bias)
        for _ in range(3):
            graph.replay()
            later.replay()
    assert torch.equal(output, expected)
    assert relative_error(early, expected.double()) <= 2e-3


def test_in_a_checkpoint_and_under_autocast(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    torch.manual_seed(0)
    model = ca.convert(Block().cuda())
    x = torch.randn(4, 16, 301, device="cuda", requires_grad=True)
    with ca.flags(budget_ms=50), torch.autocast("cuda", torch.bfloat16):
        plain = model(x)
        again = checkpoint(model, x, use_reentrant=False)
    assert torch.equal(plain, again)
    (first,) = torch.autograd.grad(plain.sum(), x)
    (second,) = torch.autograd.grad(again.sum(), x)
    assert torch.equal(first, second)


def test_without_a_policy_it_is_pytorch_s() -> None:
    x, weight, bias = operands((4, 64, 40), torch.float16)
    expected = F.group_norm(x, 8, weight, bias)
    assert not ca.norm_choices()
    with ca.enable("heuristic"):
        assert torch.equal(F.group_norm(x, 8, weight, bias), expected)
    assert not ca.norm_choices()
