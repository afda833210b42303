"""Batch and instance norms of PyTorch's own functions and modules on a GPU, under ``enable`` and
within converted models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from support.processes.subprocesses import python
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.norms.measuring import planned
from cudnn_autotune.norms.plan import FORMS, Form

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
operators = torch.ops.cudnn_autotune


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).mul(2).add(0.5).to("cuda", dtype)


def step(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, all gradients, and the running statistics after a step."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    norm.zero_grad()
    output = norm(x)
    weights = torch.linspace(0.5, 2, output.numel(), device="cuda").view(output.shape)
    output.backward(weights.to(output.dtype).sin())
    assert x.grad is not None
    named = {"output": output.detach(), "input": x.grad}
    named |= {name: p.grad for name, p in norm.named_parameters() if p.grad is not None}
    return named | {name: buffer.clone() for name, buffer in norm.named_buffers()}


def assert_near_exact(
    found: dict[str, Tensor], by_pytorch: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """Each result is as exact as PyTorch's, and of its dtype and strides."""
    assert found.keys() == by_pytorch.keys() == exact.keys()
    floor = TOLERANCES[found["output"].dtype]
    for name, actual in found.items():
        pytorchs = by_pytorch[name]
        assert (actual.dtype, actual.stride()) == (pytorchs.dtype, pytorchs.stride()), name
        allowed = 3 * relative_error(pytorchs, exact[name]) + floor
        assert relative_error(actual, exact[name]) <= allowed, name


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(24), (8, 24, 301)),
    "no place": (lambda: nn.BatchNorm1d(24), (64, 24)),
    "2d": (lambda: nn.BatchNorm2d(32), (8, 32, 28, 28)),
    "3d": (lambda: nn.BatchNorm3d(16), (2, 16, 9, 20, 24)),
    "no weight": (lambda: nn.BatchNorm2d(32, affine=False), (8, 32, 28, 28)),
    "no statistics": (lambda: nn.BatchNorm2d(32, track_running_stats=False), (8, 32, 28, 28)),
    "average of all": (lambda: nn.BatchNorm2d(32, momentum=None), (8, 32, 28, 28)),
    "instance 1d": (lambda: nn.InstanceNorm1d(24), (8, 24, 301)),
    "instance 2d": (lambda: nn.InstanceNorm2d(32, affine=True), (4, 32, 60, 62)),
    "instance, in evaluation": (lambda: nn.InstanceNorm2d(32).eval(), (4, 32, 60, 62)),
    "instance 3d": (lambda: nn.InstanceNorm3d(16, affine=True), (2, 16, 40, 48, 56)),
    "instance, with statistics": (
        lambda: nn.InstanceNorm2d(32, affine=True, track_running_stats=True),
        (4, 32, 60, 62),
    ),
}


@pytest.mark.parametrize("fastest", ["ours", "pytorch"])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_pytorch(
    seems_fastest: Callable[[str], None], name: str, dtype: torch.dtype, fastest: str
) -> None:
    """Most of them end in cuDNN's operator with float32 parameters, and in PyTorch's without or in
    bfloat16."""
    make, shape = NORMS[name]
    norm, x = make().cuda(), data(*shape, dtype=dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0)
    plain, exact = copy.deepcopy(norm), copy.deepcopy(norm).double()
    seems_fastest(fastest)
    for _ in range(3):
        with ca.enable():
            found = step(norm, x)
        assert_near_exact(found, step(plain, x), step(exact, x.double()))
    (choice,) = ca.norm_choices()
    assert choice.is_served == (fastest == "ours")
    assert not choice.rejected


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("affine", [True, False])
def test_channels_last(
    seems_fastest: Callable[[str], None], dtype: torch.dtype, affine: bool
) -> None:
    norm = nn.BatchNorm2d(32, affine=affine).cuda()
    x = data(8, 32, 28, 28, dtype=dtype).to(memory_format=torch.channels_last)
    plain, exact = copy.deepcopy(norm), copy.deepcopy(norm).double()
    seems_fastest("ours")
    with ca.enable():
        found = step(norm, x)
    assert_near_exact(found, step(plain, x), step(exact, x.double()))
    assert [one.is_served for one in ca.norm_choices()] == [True]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(1, 64, 64, 64, 64), (1, 600, 37, 41), (1, 8, 700, 700)])
def test_kernels_of_one_image(shape: tuple[int, ...], dtype: torch.dtype, form: Form) -> None:
    x, grad, weight = data(*shape, dtype=dtype), data(*shape, dtype=dtype).flip(2), data(shape[1])
    wide = x.double().requires_grad_()
    wide_weight = weight.double().requires_grad_()
    expected = F.batch_norm(wide, None, None, wide_weight, training=True)
    of_input, of_weight = torch.autograd.grad(expected, (wide, wide_weight), grad.double())
    with planned(form, False), torch.no_grad():
        for _ in range(2):  # counters are as the launch before left them
            output, mean, inv_std, _, _ = operators.batch_norm_act(
                x, weight, None, None, "identity", 1e-5
            )
            found = operators.batch_norm_act_backward(
                *(grad, None, x, None, weight, None, None, mean, inv_std, "identity"),
                [True, True, False, False],
            )
    assert relative_error(output, expected) <= TOLERANCES[dtype]
    assert relative_error(found[0], of_input) <= TOLERANCES[dtype]
    assert relative_error(found[1], of_weight) <= 10 * TOLERANCES[dtype]  # a sum that cancels


def test_what_is_served_is_the_kernels(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    x, weight, bias = data(8, 32, 28, 28), data(32), data(32)
    with ca.enable():
        output = F.batch_norm(x, None, None, weight, bias, training=True)
    expected = operators.batch_norm_act(x, weight, bias, None, "identity", 1e-5)[0]
    assert torch.equal(output, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("affine", [True, False])
def test_where_hooks_on_saved_tensors_are_in_force(
    seems_fastest: Callable[[str], None], layout: torch.memory_format, affine: bool
) -> None:
    """PyTorch computes there: a checkpoint may be computed again without ``enable()``."""
    seems_fastest("ours")
    norm = nn.BatchNorm2d(32, affine=affine).cuda()
    x = data(8, 32, 28, 28, dtype=torch.float16).to(memory_format=layout)
    expected = step(copy.deepcopy(norm), x)
    inputs = x.clone().requires_grad_()
    with ca.enable():
        step(copy.deepcopy(norm), x)
        with save_on_cpu():
            found = step(copy.deepcopy(norm), x)
        output = checkpoint(norm, inputs, use_reentrant=False)
    output.sum().backward()
    assert torch.equal(found["output"], expected["output"])
    assert torch.equal(output, expected["output"])
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, atol=1e-2, rtol=1e-2)


def test_the_backward_is_that_of_its_forward(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    norm, x = nn.BatchNorm2d(32).cuda(), data(8, 32, 28, 28).requires_grad_()
    (plain,) = torch.autograd.grad(norm(x).pow(3).sum(), x)
    early = norm(x)
    with ca.enable():
        late = norm(x)
        (of_early,) = torch.autograd.grad(early.pow(3).sum(), x)
    (of_late,) = torch.autograd.grad(late.pow(3).sum(), x)
    assert relative_error(of_early, plain) <= 1e-6
    assert relative_error(of_late, plain) <= 1e-4


def test_second_derivatives(seems_fastest: Callable[[str], None]) -> None:
    def second(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        bias = torch.zeros_like(weight)
        output = F.batch_norm(x, None, None, weight, bias, training=True)
        (first,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    seems_fastest("ours")
    x, weight = data(8, 16, 9, 10).requires_grad_(), data(16).requires_grad_()
    expected = second(*(one.detach().double().requires_grad_() for one in (x, weight)))
    with ca.enable():
        for actual, wanted in zip(second(x, weight), expected, strict=True):
            assert relative_error(actual, wanted) <= 1e-3
    assert all(one.is_served for one in ca.norm_choices())


def test_in_a_cuda_graph(seems_fastest: Callable[[str], None]) -> None:
    """A step that is captured before anything was chosen is PyTorch's; later ones are served."""
    seems_fastest("ours")
    norm, x = nn.BatchNorm2d(32).cuda(), data(8, 32, 28, 28, dtype=torch.float16).requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        output = norm(x)
        return output, torch.autograd.grad(output.float().pow(3).sum(), x)[0]

    def captured() -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        return graph, results

    with torch.cuda.stream(torch.cuda.Stream()):
        run()  # PyTorch's libraries begin
    torch.cuda.synchronize()
    with ca.enable():
        graph, early = captured()
        assert not ca.norm_choices()
        expected = run()
        later, results = captured()
        mean = norm.running_mean.clone()
        for _ in range(3):
            graph.replay()
            later.replay()
    assert all(map(torch.equal, results, expected))
    assert relative_error(early[0], expected[0]) <= 2e-3
    batch_mean = x.detach().double().mean((0, 2, 3))
    wanted = batch_mean + (mean.double() - batch_mean) * 0.9**6
    assert relative_error(norm.running_mean, wanted) <= 1e-5


class Block(nn.Module):
    """A block of nnU-Net's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 8, 3, padding=1)
        self.norm = nn.InstanceNorm3d(8, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.conv(x)), 0.01)


def test_a_converted_model_with_checkpoints_and_autocast(
    seems_fastest: Callable[[str], None],
) -> None:
    seems_fastest("ours")
    torch.manual_seed(0)
    model = ca.convert(Block().cuda())
    x = data(2, 4, 20, 20, 20).requires_grad_()
    with ca.flags(budget_ms=50), torch.autocast("cuda", torch.bfloat16):
        plain = model(x)
        again = checkpoint(model, x, use_reentrant=False)
    assert relative_error(again, plain) <= 1e-2
    (first,) = torch.autograd.grad(plain.sum(), x)
    (second,) = torch.autograd.grad(again.sum(), x)
    assert relative_error(second, first) <= 2e-2
    assert [one.is_served for one in ca.norm_choices()] == [True]


def test_transforms(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    weight, bias = data(8), data(8)

    def loss(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, bias, training=True).pow(3).sum()

    images = data(3, 4, 8, 9, 10)
    expected = torch.func.vmap(torch.func.grad(loss))(images)
    with ca.enable():
        for _ in range(2):
            found = torch.func.vmap(torch.func.grad(loss))(images)
    assert relative_error(found, expected) <= 1e-3


def test_a_compiled_model(seems_fastest: Callable[[str], None], fresh_compiler: None) -> None:
    """Inductor generates kernels for norms, and nothing is asked."""
    seems_fastest("ours")
    norm, x = nn.Sequential(nn.BatchNorm2d(32), nn.InstanceNorm2d(32)).cuda(), data(8, 32, 28, 28)
    plain, exact = copy.deepcopy(norm), copy.deepcopy(norm).double()
    with ca.enable():
        found = step(torch.compile(norm), x)
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    assert_near_exact(found, step(plain, x), step(exact, x.double()))
    assert not ca.norm_choices()


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.BatchNorm1d(4).cuda()(data(1, 4)),
        lambda: nn.InstanceNorm1d(4).cuda()(data(2, 4, 1)),
        lambda: F.batch_norm(data(2, 4, 3), data(3), data(3), training=True),
        lambda: F.batch_norm(data(2, 4, 3), data(4).cpu(), data(4).cpu(), training=True),
    ],
)
def test_errors_are_pytorch_s(call: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, ValueError)) as expected:
        call()
    with ca.enable(), pytest.raises(expected.type) as found:
        call()
    assert str(found.value) == str(expected.value)


def test_nan_and_infinity(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("ours")
    for value in (torch.nan, torch.inf):
        x = data(8, 32, 28, 28)
        x[1, 3, 2, 2] = value
        expected = F.batch_norm(x, None, None, training=True)
        with ca.enable():
            found = F.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-4, rtol=1e-4)


def test_run_serves_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, cudnn_autotune as ca\n"
        "x = torch.randn(2, 8, 40, 40, 40, device='cuda', requires_grad=True)\n"
        "torch.nn.functional.instance_norm(x).sum().backward()\n"
        "print('choices:', len(ca.norm_choices()))\n"
    )
    done = python("-m", "cudnn_autotune_cli", "run", str(script))
    assert done.returncode == 0, done.stderr
    assert "choices: 1" in done.stdout
