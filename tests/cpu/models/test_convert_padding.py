"""Converted modules that pad zeros in front of a convolution let the convolution pad."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization

import cudnn_autotune as ca
from cudnn_autotune import functional
from cudnn_autotune.models import padding

EXACT = {"rtol": 1e-9, "atol": 1e-9}


class WanCausalConv3d(nn.Conv3d):
    """The class of diffusers 0.42."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        depth, height, width = self.padding
        self._padding = (width, width, height, height, 2 * depth, 0)  # type: ignore[operator]
        self.padding = (0, 0, 0)

    def forward(self, x, cache_x=None) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        padding = list(self._padding)
        if cache_x is not None and self._padding[4] > 0:
            cache_x = cache_x.to(x.device)
            x = torch.cat([cache_x, x], dim=2)
            padding[4] -= cache_x.shape[2]
        x = F.pad(x, padding)
        return super().forward(x)


class Changed(nn.Conv3d):
    """A version with another text: the pad is not of zeros."""

    _padding = (1, 1, 1, 1, 2, 0)

    def forward(self, x, cache_x=None) -> torch.Tensor:  # type: ignore[no-untyped-def, override]
        padding = list(self._padding)
        if cache_x is not None and self._padding[4] > 0:
            cache_x = cache_x.to(x.device)
            x = torch.cat([cache_x, x], dim=2)
            padding[4] -= cache_x.shape[2]
        x = F.pad(x, padding, value=1)
        return super().forward(x)


class Inherited(WanCausalConv3d):
    """A subclass, whose methods may do other things."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, bias) * 2


class Doubling(nn.Conv3d):
    """A base whose methods do other things than PyTorch's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class DoublingInside(nn.Conv3d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight, bias) * 2


def with_base(base: type[nn.Conv3d]) -> type[nn.Conv3d]:
    """A class with the known text, and another base."""

    class Causal(base):  # type: ignore[misc, valid-type]
        _padding = (1, 1, 1, 1, 2, 0)

        def forward(self, x, cache_x=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
            padding = list(self._padding)
            if cache_x is not None and self._padding[4] > 0:
                cache_x = cache_x.to(x.device)
                x = torch.cat([cache_x, x], dim=2)
                padding[4] -= cache_x.shape[2]
            x = F.pad(x, padding)
            return super().forward(x)

    return Causal


@pytest.fixture
def paddings() -> Iterator[list[Any]]:
    """The paddings that layers convolve with, where CPU tensors take the way of a GPU's, without
    gradients."""
    seen: list[Any] = []
    general = functional.general

    def watched(name: str, arguments: Any, *policy: Any) -> Tensor:
        seen.append(arguments[4])
        return general(name, arguments, *policy)

    with (
        mock.patch.object(padding, "_is_served", lambda x: x.numel() > 0),
        mock.patch("cudnn_autotune.nn.modules.general", watched),
        torch.no_grad(),
    ):
        yield seen


def volume(frames: int = 4) -> Tensor:
    return torch.randn(1, 4, frames, 6, 5, dtype=torch.float64)


def causal(cls: type[nn.Conv3d] = WanCausalConv3d, **options: Any) -> nn.Module:
    return cls(4, 6, 3, **{"padding": 1, "dtype": torch.float64, **options})


@pytest.mark.parametrize(
    ("cached", "expected"), [(0, (2, 1, 1, 0, 1, 1)), (1, (1, 1, 1, 0, 1, 1)), (2, (0, 1, 1))]
)
def test_a_causal_convolution_pads_itself(
    cached: int, expected: tuple[int, ...], paddings: list[Any]
) -> None:
    theirs = causal()
    ours = ca.convert(copy.deepcopy(theirs))
    x, cache = volume(), volume(cached) if cached else None
    torch.testing.assert_close(ours(x, cache), theirs(x, cache), **EXACT)
    torch.testing.assert_close(ours(x, cache_x=cache), theirs(x, cache_x=cache), **EXACT)
    assert paddings == [expected] * 2


@torch.enable_grad()
@pytest.mark.parametrize("cached", [0, 1, 2])
def test_its_gradients_are_pytorchs(cached: int, paddings: list[Any]) -> None:
    theirs = causal()
    ours = ca.convert(copy.deepcopy(theirs))
    gradients = []
    x, cache = volume(), volume(cached) if cached else None
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        layer(given, cache).square().sum().backward()
        gradients.append([given.grad, *(one.grad for one in layer.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@torch.enable_grad()
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: causal(padding=(0, 1, 1)),
        lambda: nn.Sequential(nn.ZeroPad3d(1), nn.Conv3d(4, 6, 3).double()),
    ],
    ids=["causal", "sequence"],
)
def test_the_input_may_be_written_before_the_backward(
    make: Callable[[], nn.Module], frozen: bool, paddings: list[Any]
) -> None:
    """PyTorch's gradient holds the padded tensor."""
    theirs = make()
    if frozen:
        theirs.requires_grad_(False)
    ours = ca.convert(copy.deepcopy(theirs))
    start, gradients = volume(), []
    for layer in (ours, theirs):
        given = start.clone().requires_grad_()
        x = given * 2
        y = layer(x)
        x.zero_()
        y.square().sum().backward()
        gradients.append([given.grad, *(one.grad for one in layer.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_more_cached_frames_than_it_pads(paddings: list[Any]) -> None:
    """A negative pad takes frames away."""
    theirs = causal()
    ours = ca.convert(copy.deepcopy(theirs))
    x, cache = volume(), volume(3)
    torch.testing.assert_close(ours(x, cache), theirs(x, cache), **EXACT)
    assert paddings == [(0, 0, 0)]


@pytest.mark.parametrize("cls", [Changed, Inherited])
def test_classes_that_are_not_known_stay(cls: type[nn.Conv3d], paddings: list[Any]) -> None:
    theirs = causal(cls, padding=0 if cls is Changed else 1)
    ours = ca.convert(copy.deepcopy(theirs))
    x = volume()
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    assert set(paddings) <= {(0, 0, 0)}


@pytest.mark.parametrize("base", [Doubling, DoublingInside])
def test_a_known_text_with_methods_of_another_base(
    base: type[nn.Conv3d], paddings: list[Any]
) -> None:
    theirs = causal(with_base(base), padding=0)
    ours = ca.convert(copy.deepcopy(theirs))
    x = volume()
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)


def test_a_function_around_a_known_forward_runs(paddings: list[Any]) -> None:
    cls: Any = with_base(nn.Conv3d)
    forward = cls.forward

    @functools.wraps(forward)  # it has the text of what it wraps
    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * 2

    cls.forward = doubled
    theirs = causal(cls, padding=0)
    ours = ca.convert(copy.deepcopy(theirs))
    x = volume()
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)


def test_a_class_is_known_by_its_text(paddings: list[Any]) -> None:
    x = volume()
    ca.convert(causal(with_base(nn.Conv3d), padding=0))(x)
    assert paddings == [(2, 1, 1, 0, 1, 1)]


def test_it_is_reverted_copied_and_pickled(paddings: list[Any]) -> None:
    model = nn.Sequential(causal(), nn.Sequential(nn.ZeroPad3d(1), nn.Conv3d(6, 4, 3).double()))
    x, state, text = volume(), model.state_dict(), repr(model)
    expected = model(x)
    ca.convert(model)
    assert model.state_dict().keys() == state.keys()
    assert repr(model).replace("cudnn_autotune.", "") == text
    for one in (model, copy.deepcopy(model), pickle.load(io.BytesIO(pickle.dumps(model)))):
        paddings.clear()
        torch.testing.assert_close(one(x), expected, **EXACT)
        assert paddings == [(2, 1, 1, 0, 1, 1), (1, 1, 1)]
    assert ca.conversion(model).left == {}
    ca.revert(model)
    assert [type(part) for part in model] == [WanCausalConv3d, nn.Sequential]
    paddings.clear()
    torch.testing.assert_close(model(x), expected, **EXACT)
    assert paddings == []


@pytest.mark.parametrize("stride", [1, 2, (3, 2)])
@pytest.mark.parametrize("size", [(9, 8), (10, 7), (4, 4)])
def test_a_layer_of_timm(stride: Any, size: tuple[int, int], paddings: list[Any]) -> None:
    timm = pytest.importorskip("timm.layers")
    theirs = timm.Conv2dSame(4, 6, (3, 4), stride=stride, dilation=(2, 1)).double()
    ours = ca.convert(copy.deepcopy(theirs))
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    assert len(paddings) == 1, "this version of timm is known"
    torch.testing.assert_close(ours(x[0]), theirs(x[0]), **EXACT)


def test_a_weight_of_another_size_than_the_layer_of_timm_was_made_with(
    paddings: list[Any],
) -> None:
    timm = pytest.importorskip("timm.layers")
    theirs = timm.Conv2dSame(4, 6, 3, stride=2).double()
    theirs.weight = nn.Parameter(torch.randn(6, 4, 5, 4, dtype=torch.float64))
    ours = ca.convert(copy.deepcopy(theirs))
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    assert paddings == [(2, 1)]


class Dropped(nn.Module):
    """A parametrization that draws random numbers."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight)


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize(
    "parametrize",
    [
        parametrizations.spectral_norm,
        lambda layer: register_parametrization(layer, "weight", Dropped()),
    ],
    ids=["spectral", "random"],
)
@pytest.mark.parametrize(
    "make",
    [lambda: pytest.importorskip("timm.layers").Conv2dSame(4, 6, 3), causal],
    ids=["timm", "causal"],
)
def test_a_parametrized_weight_is_computed_once_in_a_forward(
    make: Callable[[], nn.Module],
    parametrize: Callable[[nn.Module], nn.Module],
    has_gradients: bool,
    paddings: list[Any],
) -> None:
    """Each time changes the vectors of a spectral norm, or draws other numbers."""
    theirs = parametrize(make().double())
    ours = ca.convert(copy.deepcopy(theirs))
    x = torch.randn(1, 4, *[6] * len(theirs.stride), dtype=torch.float64)  # type: ignore[arg-type]
    found = []
    with torch.set_grad_enabled(has_gradients):
        for layer in (ours, theirs):
            torch.manual_seed(0)
            found.append((layer(x), *layer.buffers(), torch.get_rng_state()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.filterwarnings("ignore:.*trac")
def test_a_trace_of_a_layer_of_timm_serves_other_sizes(size: int, paddings: list[Any]) -> None:
    """What is padded depends on the size: 8 pixels have one side more, and 9 do not."""
    timm = pytest.importorskip("timm.layers")
    theirs = timm.Conv2dSame(4, 6, 3, stride=2).double()
    ours = ca.convert(copy.deepcopy(theirs))
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    traced = torch.jit.trace(ours, x)
    for other in (x, torch.randn(1, 4, 12, 11, dtype=torch.float64)):
        torch.testing.assert_close(traced(other), theirs(other), **EXACT)


@torch.enable_grad()
@pytest.mark.filterwarnings("ignore:.*trac")
def test_a_trace_of_a_sequence_is_checked(paddings: list[Any]) -> None:
    """PyTorch compares the graph with one that it traces without gradients."""
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 6, 3)).double()
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    expected = model(x)
    traced = torch.jit.trace(ca.convert(model), x)
    torch.testing.assert_close(traced(x), expected, **EXACT)


SEQUENCES: dict[str, tuple[Callable[[], list[nn.Module]], list[Any]]] = {
    "uneven": (
        lambda: [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 6, 3, stride=2)],
        [(0, 0, 1, 1)],
    ),
    "its own too": (
        lambda: [nn.ReLU(), nn.ConstantPad2d((0, 1, 2, 2), 0), nn.Conv2d(4, 6, 3, padding=(0, 1))],
        [(2, 1, 2, 2)],
    ),
    "its own, one number for all": (
        lambda: [nn.ZeroPad2d((0, 1, 2, 2)), nn.Conv2d(4, 6, 3, padding=(1,))],
        [(3, 1, 3, 2)],
    ),
    "twice": (
        lambda: [nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3), nn.ZeroPad2d(2), nn.Conv2d(6, 2, 3)],
        [(1, 1), (2, 2)],
    ),
    "with a norm": (
        lambda: [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()],
        [(0, 0, 1, 1)],
    ),
    "negative": (lambda: [nn.ZeroPad2d((1, -1, 0, 0)), nn.Conv2d(4, 6, 3)], [(0, 0)]),
    "of one": (lambda: [nn.ConstantPad2d(1, 1.0), nn.Conv2d(4, 6, 3)], [(0, 0)]),
    "reflected": (lambda: [nn.ReflectionPad2d(1), nn.Conv2d(4, 6, 3)], [(0, 0)]),
    "circular": (
        lambda: [nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular")],
        [0],
    ),
    "transposed": (lambda: [nn.ZeroPad2d(1), nn.ConvTranspose2d(4, 6, 3)], [(0, 0)]),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence(name: str, paddings: list[Any]) -> None:
    make, expected = SEQUENCES[name]
    theirs = nn.Sequential(*make()).double()
    ours = ca.convert(copy.deepcopy(theirs))
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **EXACT)
    assert paddings == expected


@torch.enable_grad()
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_hooks_see_what_is_padded(register: str, place: int, paddings: list[Any]) -> None:
    model = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(4, 6, 3)).double()
    shapes: list[list[torch.Size]] = []

    def hook(_: nn.Module, *values: Any) -> None:
        tensors = (t for v in values for t in ((v,) if isinstance(v, Tensor) else v))
        shapes.append([tensor.shape for tensor in tensors if tensor is not None])

    getattr(model[place], register)(hook)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    model(x).sum().backward()
    ca.convert(model)
    model(x).sum().backward()
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]


def test_on_a_cpu_it_computes_the_same_bits() -> None:
    theirs = nn.Sequential(nn.ZeroPad3d((1, 1, 1, 1, 2, 0)), nn.Conv3d(4, 6, 3))
    ours = ca.convert(copy.deepcopy(theirs))
    x = volume().float()
    assert torch.equal(ours(x), theirs(x))
    causals = causal(dtype=torch.float32)
    assert torch.equal(ca.convert(copy.deepcopy(causals))(x), causals(x))


@pytest.mark.usefixtures("on_cpu")
def test_a_compiled_model_pads_nothing() -> None:
    model = nn.Sequential(causal(), nn.ZeroPad3d((0, 1, 0, 1, 0, 1)), nn.Conv3d(6, 4, 3).double())
    x = volume()
    expected = model(x)
    ca.convert(model)
    options = {"fuse": "always", "compare": False, "cpp.weight_prepack": False}
    with torch.no_grad():
        compiled = torch.compile(model, backend="cudnn_autotune", options=options)
        found, codes = torch._inductor.utils.run_and_get_code(compiled, x)
    torch.testing.assert_close(found, expected, **EXACT)
    assert "cudnn_autotune.conv_" in codes[0]
    assert "constant_pad" not in codes[0]
