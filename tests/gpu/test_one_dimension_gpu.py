"""Models of 1-d convolutions in channels_last on a GPU: converted, compiled, and by the backend."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close, tolerance
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

import cudnn_autotune as ca

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last
CONVOLUTIONS = 5


class Vocoder(nn.Module):
    """1-d convolutions, one of them transposed, and operators between them that keep a layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, 64, 7, padding=3)
        self.up = nn.ConvTranspose1d(64, 32, 16, 8, 4)
        self.dilated = nn.Conv1d(32, 32, 3, padding=3, dilation=3)
        self.plain = nn.Conv1d(32, 32, 11, padding=5)
        self.pointwise = nn.Conv1d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(self.first(x), 0.1))
        x = x + self.plain(F.leaky_relu(self.dilated(F.leaky_relu(x, 0.1)), 0.1))
        return torch.tanh(self.pointwise(x))


def made(dtype: torch.dtype) -> tuple[Vocoder, Tensor]:
    """A model with weights that the dtype has exactly, and an input."""
    torch.manual_seed(0)
    model = Vocoder().cuda().to(dtype)
    return model, torch.randn(4, 80, 48, device="cuda", dtype=dtype)


def in_float64(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double().cpu()(x.double().cpu())  # type: ignore[no-any-return]


def is_last(tensor: Tensor) -> bool:
    """Whether it is dense with the strides of images of height 1 in channels_last."""
    _, channels, length = tensor.shape
    return tensor.stride() == (channels * length, 1, channels)


def copies(model: nn.Module, x: Tensor) -> int:
    """How often the forward copies a tensor into another layout, after a first call."""
    with torch.no_grad():
        model(x)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(x)
    return sum(event.count for event in profiled.key_averages() if event.key == "aten::copy_")


def formats(*ops: str) -> set[tuple[int, torch.memory_format]]:
    """The spatial dimensions and layouts of the problems of these operations that were chosen."""
    problems = [choice.problem for choice in ca.choices()]
    return {(p.spatial_dims, p.memory_format) for p in problems if p.op in ops}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_converted_model_stays_in_channels_last(dtype: torch.dtype) -> None:
    """The first convolution copies a contiguous input; nothing is copied after it."""
    model, x = made(dtype)
    expected = in_float64(model, x)
    ca.convert(model, "heuristic", memory_format=LAST)
    with torch.no_grad():
        output = model(x)
    assert_close(output, expected, 6 * tolerance(dtype, allow_tf32=True))
    assert is_last(output)
    assert formats("fprop", "dgrad") == {(2, LAST)}
    assert copies(model, x) == 1
    assert copies(model, x.transpose(1, 2).contiguous().transpose(1, 2)) == 0


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_gradients(way: str, cudnn_flags: Callable[..., None]) -> None:
    """Also those of a compiled step are computed in channels_last."""
    cudnn_flags(allow_tf32=False)
    model, x = made(torch.float32)
    wide = copy.deepcopy(model).double()
    wide(x.double()).square().sum().backward()
    ca.convert(model, "heuristic", memory_format=LAST)
    run: Any = torch.compile(model) if way == "compiled" else model
    run(x).square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert other.grad is not None, name
        assert parameter.grad.stride() == parameter.stride(), name
        # A sum over all positions has 100 times the error of one of its terms.
        assert_close(parameter.grad, other.grad, 1e-3)
    assert formats("fprop", "dgrad", "wgrad") == {(2, LAST)}
    wgrads = [choice for choice in ca.choices() if choice.problem.op == "wgrad"]
    assert len(wgrads) == CONVOLUTIONS


def test_the_layout_is_measured() -> None:
    model, x = made(torch.float16)
    with torch.no_grad():
        expected = model(x)
        ca.convert(model, "heuristic", memory_format="auto", example_input=x)
        output = model(x)
    choice = ca.conversion(model).memory_format
    assert choice.times_ms.keys() == {CONTIGUOUS, LAST}
    assert choice.chosen == min(choice.times_ms, key=choice.times_ms.__getitem__)
    assert is_last(model.plain.weight) == (choice.chosen == LAST)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    assert formats("fprop") == {(1, CONTIGUOUS), (2, LAST)}


@pytest.mark.parametrize("is_given_last", [False, True])
@pytest.mark.parametrize("freezing", [False, True])
def test_the_backend_measures_the_layout(
    freezing: bool, is_given_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program is right and gives the strides of the model, and weights are laid out by few
    kernels."""
    from cudnn_autotune.compile import compiled_graph

    model, x = made(torch.float16)
    expected = in_float64(model.eval(), x)
    if is_given_last:
        ca.convert(model, "heuristic", memory_format=LAST)
    outputs: dict[str, Tensor] = {}
    compare = compiled_graph.compare

    def compared(programs: Any, inputs: Any, *rest: Any) -> Any:
        found = compare(programs, inputs, *rest)
        assert not found.wrong
        outputs.update({name: program(*inputs)[0].clone() for name, program in programs.items()})
        return found

    monkeypatch.setattr(compiled_graph, "compare", compared)
    options = {
        **{"fuse": "always", "sampling": "heuristic", "memory_format": "auto"},
        "freezing": freezing,
    }
    run: Any = torch.compile(model, backend="cudnn_autotune", options=options)
    with torch.no_grad():
        strides = model(x).stride()
        output, codes = run_and_get_code(run, x)
    assert_close(output, expected, 6 * tolerance(torch.float16))
    assert output.stride() == strides
    # Without a word it is channels_last.
    names = {"inductor", "cudnn_autotune", "cudnn_autotune, contiguous"}
    assert outputs.keys() == (names | {"inductor, frozen"} if freezing else names)
    for name, one in outputs.items():
        assert_close(one, expected, 6 * tolerance(torch.float16))
        if name != "inductor, frozen":
            assert one.stride() == strides, name
    assert formats("fprop") == {(1, CONTIGUOUS), (2, LAST)}
    assert formats("dgrad") == {(1, CONTIGUOUS), (2, LAST)}
    launches = [len(re.findall(r"triton_\w+\.run\(", code)) for code in codes]
    # The input, the output and all weights together.
    assert launches[-1] <= launches[0] + 3


def test_lengths_that_change() -> None:
    """Each length is compiled, or the sizes are dynamic and the layout stays Inductor's."""
    model, _ = made(torch.float16)
    options = {"sampling": "heuristic", "memory_format": "auto"}
    run: Any = torch.compile(model.eval(), backend="cudnn_autotune", options=options)
    for length in (40, 56, 72):
        x = torch.randn(2, 80, length, device="cuda", dtype=torch.float16)
        with torch.no_grad():
            output = run(x)
        assert_close(output, in_float64(model, x), 6 * tolerance(torch.float16))
        assert output.is_contiguous()


def test_inside_a_cuda_graph() -> None:
    model, x = made(torch.float16)
    options = {"sampling": "heuristic", "memory_format": "auto"}
    run: Any = torch.compile(model.eval(), backend="cudnn_autotune", options=options)
    with torch.no_grad():
        run(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run(x)
        model.plain.weight.mul_(-1)  # the graph lays out the weights at each replay
        x.mul_(0.5)
        graph.replay()
    assert_close(output, in_float64(model, x), 6 * tolerance(torch.float16))
