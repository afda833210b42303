"""``enable`` on a GPU: PyTorch's own functions and modules run chosen engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.conv.references import assert_close, tolerance
from support.conv.training_steps import assert_same_step, training_step
from support.conv.transforms import TRANSFORMS
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.profiler import ProfilerActivity, profile

import cudnn_autotune as ca

# Modules, and the shape of their input.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(8, 12, 5, padding=2, stride=2), (4, 8, 50)),
    "conv2d": (lambda: nn.Conv2d(8, 12, 3, padding=1), (4, 8, 20, 18)),
    "conv3d": (lambda: nn.Conv3d(8, 12, 3, padding=1), (2, 8, 9, 10, 8)),
    "same": (lambda: nn.Conv2d(8, 12, (4, 3), padding="same"), (4, 8, 20, 18)),
    "valid": (lambda: nn.Conv2d(8, 12, 3, padding="valid", bias=False), (4, 8, 20, 18)),
    "circular": (lambda: nn.Conv2d(8, 12, 3, padding=1, padding_mode="circular"), (4, 8, 20, 18)),
    "groups": (lambda: nn.Conv2d(8, 16, 3, groups=4, dilation=2), (4, 8, 20, 18)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, padding=1), (4, 8, 20, 18)),
    "pointwise": (lambda: nn.Conv2d(8, 12, 1), (4, 8, 20, 18)),
    "unbatched": (lambda: nn.Conv2d(8, 12, 3), (8, 20, 18)),
    "transposed1d": (lambda: nn.ConvTranspose1d(8, 12, 5, stride=2), (4, 8, 50)),
    "transposed2d": (
        lambda: nn.ConvTranspose2d(8, 12, 3, stride=2, padding=1, output_padding=1, groups=2),
        (4, 8, 20, 18),
    ),
    "transposed3d": (lambda: nn.ConvTranspose3d(8, 12, 2, stride=2), (2, 8, 5, 6, 4)),
}
# With channels_last only where the rank has such a layout.
LAYOUTS = [
    (name, channels_last)
    for name, (_, shape) in LAYERS.items()
    for channels_last in ([False, True] if len(shape) in (4, 5) else [False])
]


@pytest.fixture(autouse=True)
def disabled(cudnn_flags: Callable[..., None]) -> Iterator[None]:
    ca.set_sampling("heuristic")
    cudnn_flags(allow_tf32=False)
    ca.disable()
    yield
    ca.disable()


def model_and_input(
    name: str, dtype: torch.dtype = torch.float32, channels_last: bool = False
) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    module, input = make().to("cuda", dtype), torch.randn(shape).to("cuda", dtype)
    if channels_last:
        layout = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
        module.to(memory_format=layout)
        input = input.contiguous(memory_format=layout)
    return module, input


def chosen() -> set[str]:
    """The operations that were tuned since the last ``ca.forget()``."""
    return {choice.problem.op for choice in ca.choices()}


class Tuned(nn.Module):
    """Enables before it calls a module, so that the backward that follows is served too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Any:
        ca.enable()
        return self.module(input)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "channels_last"), LAYOUTS)
def test_steps(name: str, channels_last: bool, dtype: torch.dtype) -> None:
    """Outputs and gradients, with their strides, are PyTorch's; all three operations are tuned."""
    module, input = model_and_input(name, dtype, channels_last)
    assert_same_step(module, Tuned(module), input, 2 * tolerance(dtype))
    assert chosen() == {"fprop", "dgrad", "wgrad"}
    assert set(ca.fallbacks()) <= {"PyTorch's own path was chosen (see choices())"}


def test_nothing_is_tuned_after_disable() -> None:
    module, input = model_and_input("conv2d")
    with ca.enable():
        pass
    training_step(module, input)
    assert not ca.choices()
    assert not ca.fallbacks()


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "transposed2d", "depthwise"])
def test_derivatives(name: str) -> None:
    make, _ = LAYERS[name]
    module = make().to("cuda", torch.float64)
    size = module.weight.dim() - 2
    input = torch.randn(1, 8, *(4,) * size, device="cuda", dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in module.named_parameters()]

    def call(input: Tensor, *parameters: Tensor) -> Any:
        return functional_call(module, dict(zip(names, parameters, strict=True)), (input,))

    tensors = (input, *module.parameters())
    with ca.enable():
        assert gradcheck(call, tensors, fast_mode=True, nondet_tol=1e-10)
        assert gradgradcheck(call, tensors, fast_mode=True, nondet_tol=1e-10)
    assert chosen() == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    input = torch.randn(2, 3, 6, 5, device="cuda", dtype=torch.float64)
    weight = torch.randn(4, 3, 3, 2, device="cuda", dtype=torch.float64)
    expected = TRANSFORMS[name](input, weight)
    with ca.enable():
        assert_close(TRANSFORMS[name](input, weight), expected, 1e-12, name)
    assert ca.choices()


def test_other_threads_are_tuned_too() -> None:
    module, input = model_and_input("conv2d")
    with ca.enable():
        thread = threading.Thread(target=training_step, args=(module, input))
        thread.start()
        thread.join()
    assert chosen() == {"fprop", "dgrad", "wgrad"}


def test_a_captured_step_replays() -> None:
    module, input = model_and_input("conv2d", torch.float16)
    expected = module(input)
    with ca.enable(), torch.no_grad():
        module(input)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(input)
    graph.replay()
    assert_close(output, expected, 4e-3)


@pytest.mark.parametrize(
    ("name", "channels_last"),
    [case for case in LAYOUTS if case[0] in ("conv1d", "conv2d", "conv3d", "depthwise")],
)
def test_compiled_code_is_tuned_when_it_runs(name: str, channels_last: bool) -> None:
    """Inductor checks the strides of each output against PyTorch's."""
    torch.compiler.reset()
    module, input = model_and_input(name, torch.float16, channels_last)
    model = nn.Sequential(module, nn.ReLU())
    compiled = torch.compile(model, fullgraph=True)
    expected = training_step(compiled, input)
    assert not ca.choices()
    with ca.enable():
        actual = training_step(compiled, input)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs, 4e-3)
    assert chosen() == {"fprop", "dgrad", "wgrad"}
    ca.disable()
    ca.forget()
    training_step(compiled, input)
    assert not ca.choices()


def test_pytorchs_own_path_does_not_call_itself() -> None:
    """A pinned choice of it makes the operator call aten::convolution."""
    module, input = model_and_input("depthwise")
    with ca.enable():
        training_step(module, input)
    for choice in ca.choices():
        ca.pin(choice.problem, "aten")
    assert_same_step(module, Tuned(module), input)
    assert sum(ca.fallbacks().values()) > 0


def test_what_cudnn_may_not_compute_is_pytorchs(cudnn_flags: Callable[..., None]) -> None:
    input = torch.randn(2, 4, 9, 8, device="cuda", dtype=torch.float16)
    weight = torch.randn(6, 4, 3, 3, device="cuda", dtype=torch.float16)
    cudnn_flags(enabled=False)
    arguments = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    layout = {"memory_format": torch.channels_last}
    input, weight = input.contiguous(**layout), weight.contiguous(**layout)
    expected = torch.ops.aten.convolution(input, weight, *arguments)
    with ca.enable():
        actual = torch.ops.aten.convolution(input, weight, *arguments)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    assert not ca.choices()
    assert sum(ca.fallbacks().values()) == 1


def test_profiles_show_pytorchs_operator_and_not_its_engine() -> None:
    module, input = model_and_input("conv2d", torch.float16)
    with ca.enable():
        module(input)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
            module(input)
    names = [event.name for event in recorded.events()]
    assert "aten::convolution" in names
    assert "aten::cudnn_convolution" not in names
