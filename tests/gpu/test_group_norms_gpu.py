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


def in_channels_last(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def is_in_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.movedim(1, -1).is_contiguous()


ROWS = {
    "instances": ((2, 64, 24, 20, 28), 64),
    "one instance, larger than what is kept": ((1, 32, 96, 96, 96), 32),
    "an odd number of channels": ((3, 27, 41, 37), 27),
    "groups that reach over slabs": ((2, 320, 40, 40), 32),
    "one group of all": ((4, 96, 33, 35), 1),
    "one dimension": ((4, 48, 3001), 12),
    "two places": ((64, 40, 2), 8),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_kernels_in_channels_last(name: str, dtype: torch.dtype, form: Form) -> None:
    shape, groups = ROWS[name]
    x, weight, bias = operands(shape, dtype)
    x, weight, bias = in_channels_last(x), weight.float(), bias.float()
    grad_output = in_channels_last(torch.randn(shape, device="cuda")).to(dtype)
    leaves = [one.double().requires_grad_() for one in (x, weight, bias)]
    expected = F.group_norm(leaves[0], groups, *leaves[1:], 1e-3)
    grads = torch.autograd.grad(expected, leaves, grad_output.double())
    operators = torch.ops.cudnn_autotune
    seen = []
    with planned(form, False):
        for _ in range(3):  # counters are as the launch before left them
            output, statistics = operators.group_norm(x, weight, bias, groups, 1e-3)
            given = (grad_output, x, weight, statistics, groups, [True] * 3)
            found = operators.group_norm_backward(*given)
            seen.append((output, *found))
    for one, again in zip(seen[0], seen[2], strict=True):
        assert torch.equal(one, again)
    assert output.stride() == found[0].stride() == x.stride()
    assert relative_error(output, expected) <= DTYPES[dtype]
    assert relative_error(found[0], grads[0]) <= max(DTYPES[dtype], 2e-5)
    assert relative_error(found[1], grads[1]) <= 1e-4
    assert relative_error(found[2], grads[2]) <= 1e-4


class Volumes(nn.Module):
    """A convolution, an instance norm and a leaky ReLU, then a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(4, 32, 3, padding=1), nn.Conv3d(32, 32, 3, padding=1)
        self.norm, self.norm2 = nn.InstanceNorm3d(32, affine=True), nn.GroupNorm(8, 32)
        self.act = nn.LeakyReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.second(self.act(self.norm(self.first(x)))))


def weighted_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients of a sum with weights, which norms do not make 0."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    output = model(x)
    weights = torch.linspace(-1, 1, output.numel(), device="cuda").view(output.shape)
    (output.float() * weights).sum().backward()
    gradients = [x.grad, *(p.grad for n, p in model.named_parameters() if n[-6:] == "weight")]
    return [output.detach(), *(one.clone() for one in gradients if one is not None)]


@pytest.mark.parametrize("fastest", ["ours", "pytorch"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_in_channels_last(
    seems_fastest: Callable[[str], None],
    cudnn_flags: Callable[..., None],
    fastest: str,
    autocast: bool,
) -> None:
    # Rounding must not move values across the zero of the leaky ReLU: TF32 moves 1 in 10,000.
    cudnn_flags(allow_tf32=False)
    torch.manual_seed(0)
    model = Volumes().cuda()
    x = torch.randn(2, 4, 10, 11, 12, device="cuda")
    exact = weighted_step(model.double(), x.double())
    model.float()
    precision = torch.autocast("cuda", torch.bfloat16, enabled=autocast)
    with precision:
        pytorch = weighted_step(model, x)
    seems_fastest(fastest)
    ca.convert(model, memory_format=torch.channels_last_3d)
    layouts: list[bool] = []
    for norm in (model.norm, model.norm2):
        norm.register_forward_hook(lambda *call: layouts.append(is_in_channels_last(call[2])))
    with ca.flags(budget_ms=50), precision:
        for _ in range(2):
            found = weighted_step(model, x)
    assert layouts == [True] * 4
    assert found[0].dtype == pytorch[0].dtype
    first = {name: choices[0] for name, choices in ca.conversion(model).norms.items()}
    assert {name: one.is_served for name, one in first.items()} == dict.fromkeys(
        ("norm", "norm2"), fastest == "ours"
    )
    for actual, by_pytorch, wanted in zip(found, pytorch, exact, strict=True):
        allowed = 2 * relative_error(by_pytorch, wanted) + (1e-2 if autocast else 1e-4)
        assert relative_error(actual, wanted) <= allowed


def test_a_step_in_channels_last_transposes_nothing(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    model = nn.Sequential(nn.InstanceNorm3d(32, affine=True), nn.LeakyReLU(0.01)).cuda()
    ca.convert(model, memory_format=torch.channels_last_3d)
    x = in_channels_last(torch.randn(2, 32, 24, 24, 24, device="cuda")).requires_grad_()
    grad_output = in_channels_last(torch.randn_like(x))
    torch.autograd.grad(model(x), [x, *model.parameters()], grad_output)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(model(x), [x, *model.parameters()], grad_output)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert any("norm_backward" in name for name in names), names
    assert not any("copy" in name.lower() for name in names), names


def test_in_channels_last_in_a_cuda_graph(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    norm = ca.convert(
        nn.Sequential(nn.Conv2d(32, 32, 1), nn.GroupNorm(4, 32)).cuda().half(),
        memory_format=torch.channels_last,
    )
    x = in_channels_last(torch.randn(2, 32, 40, 40, device="cuda").half()).requires_grad_()

    def run() -> list[Tensor]:
        output = norm(x)
        return [output, *torch.autograd.grad(output.float().pow(3).sum(), x)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with ca.flags(budget_ms=50), torch.cuda.stream(stream):
        for _ in range(2):
            expected = run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(3):
        graph.replay()
    for one, again in zip(found, expected, strict=True):
        assert relative_error(one, again.double()) <= 1e-3


def test_without_a_policy_it_is_pytorch_s() -> None:
    x, weight, bias = operands((4, 64, 40), torch.float16)
    expected = F.group_norm(x, 8, weight, bias)
    assert not ca.norm_choices()
    with ca.enable("heuristic"):
        assert torch.equal(F.group_norm(x, 8, weight, bias), expected)
    assert not ca.norm_choices()
