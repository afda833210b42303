"""Filters in front of pixel shuffles are put phase by phase, and the pixels stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile.rewritten import LAST, OPTIONS, check_changing_weights, run
from support.conv.references import TOLERANCES, assert_close
from support.models.made import Made
from torch import Tensor, nn
from torch.fx import GraphModule

from cudnn_autotune.compile import programs, shuffles

pytestmark = pytest.mark.usefixtures("on_cpu")

SIZES = {2: (2, 8, 13, 15), 3: (2, 8, 3, 9, 7)}
_CONVOLUTIONS = ("aten.convolution.default", "cudnn_autotune.conv_fused.default")


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the filters of each convolution that was compiled are ordered; small outputs too."""
    found: list[bool] = []
    compile_tagged = programs.compile_tagged

    def compile_and_tell(graph: GraphModule, inputs: Any, **arguments: Any) -> Any:
        for node in graph.graph.nodes:
            if str(node.target) in _CONVOLUTIONS:
                found.append(node.args[1].target is torch.ops.aten.index.Tensor)
        return compile_tagged(graph, inputs, **arguments)

    monkeypatch.setattr(programs, "compile_tagged", compile_and_tell)
    monkeypatch.setattr(shuffles, "_LEAST_NUMBERS", 0)
    monkeypatch.setattr(shuffles, "_LEAST_RATIO", 0)
    return found


def conv(kernels: int, dims: int = 2, edge: int = 3, **options: Any) -> nn.Module:
    options = {"padding": edge // 2, **options}
    layer: nn.Module = getattr(nn, f"Conv{dims}d")(8, kernels, edge, **options)
    return layer


def images(dims: int = 2) -> Tensor:
    return torch.randn(SIZES[dims]).contiguous(memory_format=LAST[dims + 2])


def check(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Compares values and strides with PyTorch's."""
    model = model.eval().to(memory_format=LAST[x.dim()])
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.normal_(one.running_mean, std=0.2)
            nn.init.uniform_(one.running_var, 0.5, 2)
            nn.init.normal_(one.weight)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        assert_close(run(model, x, **options), expected, TOLERANCES[torch.float32])


def apart(y: Tensor, *factors: int) -> Tensor:
    """The shuffle as diffusers' decoders of videos write it; one frame less if there are more."""
    images, _, *sizes = y.shape
    y = y.reshape(images, -1, *factors, *sizes)
    n = len(factors)
    dims = [dim for i in range(n) for dim in (2 + n + i, 2 + i)]
    y = y.permute(0, 1, *dims)
    for dim in reversed(range(n)):
        y = y.flatten(2 + 2 * dim, 3 + 2 * dim)
    return y[:, :, factors[0] - 1 :] if n == 3 else y


def upsampler(model: Any, x: Tensor) -> Tensor:
    """LTX-Video's, with the residual, and a norm of channels behind it."""
    y = apart(model.conv(x), 2, 2, 2) + apart(x, 2, 2, 2).repeat(1, 16, 1, 1, 1)
    return F.silu(F.normalize(y, dim=1)) + y


def twice(model: Any, x: Tensor) -> Tensor:
    y = F.pixel_shuffle(model.conv(x), 2)
    return y.tanh() + y.flip(1)


MODELS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "pixel_shuffle": lambda: (nn.Sequential(conv(64), nn.PixelShuffle(2)), 2),
    "no bias": lambda: (nn.Sequential(conv(64, bias=False), nn.PixelShuffle(2)), 2),
    "factor 3": lambda: (nn.Sequential(conv(144), nn.PixelShuffle(3), nn.PReLU(16)), 2),
    "1x1, strided": lambda: (nn.Sequential(conv(64, 2, 1, stride=2), nn.PixelShuffle(2)), 2),
    "activation": lambda: (nn.Sequential(conv(64), nn.ReLU(), nn.PixelShuffle(2)), 2),
    "norm": lambda: (nn.Sequential(conv(64), nn.BatchNorm2d(64), nn.PixelShuffle(2)), 2),
    "columns": lambda: (Made(lambda m, x: apart(m.conv(x), 1, 3), conv=conv(48)), 2),
    "read twice behind it": lambda: (Made(twice, conv=conv(64)), 2),
    "volumes": lambda: (Made(lambda m, x: apart(m.conv(x), 2, 1, 2), conv=conv(64, 3)), 3),
    "volumes with residual": lambda: (Made(upsampler, conv=conv(128, 3)), 3),
    "volumes without bias": lambda: (Made(upsampler, conv=conv(128, 3, bias=False)), 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_values(name: str, ordered: list[bool]) -> None:
    model, dims = MODELS[name]()
    check(model, images(dims))
    assert ordered == [True]


def parts(joined: int, *dims: int) -> nn.Module:
    """A dimension that looks like channels is one of heads of an attention, or another one."""

    def rearranged(model: Any, x: Tensor) -> Tensor:
        y = model.conv(x).unflatten(1, (16, 4)).permute(dims).contiguous()
        return y.flatten(joined, joined + 1) * 2

    return Made(rearranged, conv=conv(64))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "two readers": lambda: Made(
        lambda m, x: F.pixel_shuffle(y := m.conv(x), 2) + y.mean(), conv=conv(64)
    ),
    "few channels": lambda: nn.Sequential(conv(60), nn.PixelShuffle(2)),
    "groups": lambda: nn.Sequential(conv(64, groups=2), nn.PixelShuffle(2)),
    "residual": lambda: Made(
        lambda m, x: F.pixel_shuffle(m.conv(x) + x.repeat(1, 8, 1, 1), 2), conv=conv(64)
    ),
    "heads": lambda: parts(2, 0, 1, 3, 4, 2),
    "transposed": lambda: parts(3, 0, 1, 2, 4, 3),
    "rotated": lambda: parts(3, 0, 3, 1, 4, 2),
    "a view is returned": lambda: Made(
        lambda m, x: m.conv(x).unflatten(1, (16, 2, 2)).permute(0, 1, 4, 2, 5, 3), conv=conv(64)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str, ordered: list[bool]) -> None:
    check(OTHERS[name](), images())
    assert ordered == [False]


def test_contiguous_convolutions_stay(ordered: list[bool]) -> None:
    model = nn.Sequential(conv(64), nn.PixelShuffle(2))
    x = torch.randn(SIZES[2])
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        for options in ({"layout_optimization": False}, {"layout_optimization": True}):
            assert_close(run(model, x, **options), expected, TOLERANCES[torch.float32])
        assert_close(run(model.double(), x.double()), expected, TOLERANCES[torch.float64])
    assert ordered == [False, True, False]


@pytest.mark.parametrize(("name", "least"), [("_LEAST_NUMBERS", 24961), ("_LEAST_RATIO", 6)])
def test_small_outputs_stay(
    name: str, least: int, ordered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output has 24960 numbers, and the filters 4608."""
    model, x = nn.Sequential(conv(64), nn.PixelShuffle(2)), images()
    run(model.to(memory_format=LAST[4]), x)
    monkeypatch.setattr(shuffles, name, least)
    run(model, x)
    assert ordered == [True, False]


def test_dynamic_sizes(ordered: list[bool]) -> None:
    model = nn.Sequential(conv(64), nn.PixelShuffle(2)).to(memory_format=LAST[4])
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS, dynamic=True)
    with torch.no_grad():
        for width in (9, 12):
            x = torch.randn(2, 8, width + 1, width).contiguous(memory_format=LAST[4])
            expected = copy.deepcopy(model).double()(x.double())
            assert_close(ours(x), expected, TOLERANCES[torch.float32])
    assert ordered == [True]


@pytest.mark.parametrize("freezing", [False, True])
def test_weights_that_change(freezing: bool, ordered: list[bool]) -> None:
    model = nn.Sequential(conv(64), nn.PixelShuffle(2)).to(memory_format=LAST[4]).eval()
    check_changing_weights(model, images(), freezing=freezing)
    assert all(ordered)
    assert ordered


def test_training_graphs_stay(ordered: list[bool]) -> None:
    model = nn.Sequential(conv(64), nn.PixelShuffle(2)).to(memory_format=LAST[4])
    exact, x = copy.deepcopy(model).double(), images()
    torch.compile(model, backend="cudnn_autotune", options=OPTIONS)(x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert_close(one.grad, other.grad, 10 * TOLERANCES[torch.float32])
    assert ordered
    assert not any(ordered)
