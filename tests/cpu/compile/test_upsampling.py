"""Convolutions behind nearest neighbours read the small image, and the result stays the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import TOLERANCES, assert_close, relative_error
from support.models.made import Made
from torch import Tensor, nn
from torch.fx import GraphModule

from cudnn_autotune.compile import programs, upsampling

pytestmark = pytest.mark.usefixtures("on_cpu")

OPTIONS = {"fuse": "always", "norms": "never", "compare": False, "cpp.weight_prepack": False}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
SIZES = {2: (2, 8, 9, 7), 3: (2, 8, 3, 5, 4)}
FUNCTIONS: dict[int, Callable[..., Tensor]] = {2: F.conv2d, 3: F.conv3d}
LAYOUTS = ["contiguous", "channels_last"]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of convolutions of each compiled program that read a small image; also of small
    ones."""
    found: list[int] = []

    def count(graph: GraphModule) -> None:
        upsampling.convolve_before_upsampling(graph)
        found.append(sum(node.target is upsampling.conv_upsampled for node in graph.graph.nodes))

    monkeypatch.setattr(programs, "convolve_before_upsampling", count)
    monkeypatch.setattr(upsampling, "_LEAST_PLACES", 0)
    monkeypatch.setattr(upsampling, "_LEAST_PRODUCTS", 0)
    return found


def doubled(dims: int) -> list[tuple[bool, ...]]:
    return [one for one in itertools.product((False, True), repeat=dims) if any(one)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lengths", [*doubled(2), *doubled(3)], ids=str)
def test_formula(lengths: Sequence[bool], dtype: torch.dtype, layout: str) -> None:
    dims = len(lengths)
    x, weight = torch.randn(SIZES[dims]).to(dtype), torch.randn(6, 8, *[3] * dims).to(dtype)
    bias = torch.randn(6).to(dtype)
    if layout == "channels_last":
        x = x.to(memory_format=LAST[x.dim()])
    factors = tuple(2.0 if one else 1.0 for one in lengths)
    large = F.interpolate(x, scale_factor=factors)
    expected = FUNCTIONS[dims](large, weight, bias, 1, 1)
    found = upsampling.conv_upsampled(x, weight, bias, 1, 1, 1, doubled=lengths)
    assert_close(found, expected, TOLERANCES[dtype])
    if dtype == torch.float32:  # on a GPU float64 is contiguous
        assert found.stride() == expected.stride()


def test_other_lengths_keep_their_geometry() -> None:
    """A causal convolution of volumes with 5 taps in time, of which every second frame is left."""
    x, weight = torch.randn(1, 4, 7, 6, 5), torch.randn(3, 4, 5, 3, 3)
    padding = (4, 1, 1, 0, 1, 1)
    large = F.interpolate(x, scale_factor=(1, 2, 2))
    expected = F.conv3d(F.pad(large, (1, 1, 1, 1, 4, 0)), weight, None, (2, 1, 1))
    given = (x, weight, None, (2, 1, 1), padding, 1)
    found = upsampling.conv_upsampled(*given, doubled=(False, True, True))
    assert_close(found, expected, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_of_sums(dtype: torch.dtype) -> None:
    """The error is at most twice PyTorch's, which rounds the output alone."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 64, 12, 12).to(dtype), torch.randn(32, 64, 3, 3).to(dtype)
    large = F.interpolate(x, scale_factor=2)
    exact = F.conv2d(large.double(), weight.double(), None, 1, 1)
    theirs = relative_error(exact.to(dtype), exact)
    found = upsampling.conv_upsampled(x, weight, None, 1, 1, 1, doubled=(True, True))
    assert relative_error(found, exact) <= 2 * theirs


def test_weights_that_are_not_finite_stay_where_they_are() -> None:
    x, weight = torch.randn(1, 4, 5, 5), torch.randn(3, 4, 3, 3)
    weight[1, 2, 0, 1], x[0, 3, 2, 2] = torch.inf, torch.nan
    expected = F.conv2d(F.interpolate(x, scale_factor=2), weight, None, 1, 1)
    found = upsampling.conv_upsampled(x, weight, None, 1, 1, 1, doubled=(True, True))
    assert torch.equal(found.isnan(), expected.isnan())
    assert_close(found.nan_to_num(), expected.nan_to_num(), TOLERANCES[torch.float32])


def conv(dims: int = 2, taps: Any = 3, **options: Any) -> nn.Module:
    layer: nn.Module = getattr(nn, f"Conv{dims}d")(8, 8, taps, **{"padding": 1, **options})
    return layer


def made(up: Callable[[Tensor], Tensor], dims: int = 2, **options: Any) -> nn.Module:
    return Made(lambda model, x: model.conv(up(x)), conv=conv(dims, **options))


def in_float(x: Tensor) -> Tensor:
    """Wan's decoder."""
    return F.interpolate(x.double(), scale_factor=(2.0, 2.0), mode="nearest-exact").type_as(x)


def volumes(x: Tensor) -> Tensor:
    return F.pad(F.interpolate(x, scale_factor=(1.0, 2.0, 2.0)), (0, 0, 0, 0, 1, 0))


MODELS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "module": lambda: (nn.Sequential(nn.Upsample(scale_factor=2), conv(), nn.ReLU()), 2),
    "no bias": lambda: (made(lambda x: F.interpolate(x, scale_factor=2.0), bias=False), 2),
    "size": lambda: (made(lambda x: F.interpolate(x, size=(18, 14))), 2),
    "rows": lambda: (made(lambda x: F.interpolate(x, scale_factor=(2, 1))), 2),
    "converted": lambda: (made(in_float), 2),
    "norm": lambda: (
        nn.Sequential(nn.UpsamplingNearest2d(scale_factor=2), conv(), nn.BatchNorm2d(8)),
        2,
    ),
    "two readers": lambda: (
        Made(
            lambda m, x: m.conv(y := F.interpolate(x, scale_factor=2)) + y,
            conv=conv(),
        ),
        2,
    ),
    "volumes": lambda: (made(lambda x: F.interpolate(x, scale_factor=2), 3), 3),
    "causal volumes": lambda: (made(volumes, 3), 3),
}


def run(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    torch._dynamo.reset()
    ours = torch.compile(
        copy.deepcopy(model), backend="cudnn_autotune", options={**OPTIONS, **options}
    )
    with torch.no_grad():
        result: Tensor = ours(x)
    return result


def check(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Compares values and strides with PyTorch's."""
    model = model.eval()
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.normal_(one.running_mean, std=0.2)
            nn.init.uniform_(one.running_var, 0.5, 2)
    with torch.no_grad():
        expected = model(x)
        found = run(model, x, **options)
        assert_close(found, copy.deepcopy(model).double()(x.double()), TOLERANCES[x.dtype])
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, layout: str, replaced: list[int]) -> None:
    model, dims = MODELS[name]()
    x = torch.randn(SIZES[dims])
    if layout == "channels_last":
        model, x = (one.to(memory_format=LAST[x.dim()]) for one in (model, x))
    check(model, x)
    assert replaced == [1]


def written(x: Tensor) -> Tensor:
    y = F.interpolate(x, scale_factor=2)
    return y.add_(1)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "factor 4": lambda: made(lambda x: F.interpolate(x, scale_factor=4)),
    "factor 1.5": lambda: made(lambda x: F.interpolate(x, scale_factor=1.5)),
    "bilinear": lambda: made(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "smaller": lambda: made(lambda x: F.interpolate(x, scale_factor=0.5)),
    "5 taps": lambda: made(lambda x: F.interpolate(x, scale_factor=2), taps=5, padding=2),
    "stride": lambda: made(lambda x: F.interpolate(x, scale_factor=2), stride=2),
    "dilation": lambda: made(lambda x: F.interpolate(x, scale_factor=2), dilation=2),
    "no padding": lambda: made(lambda x: F.interpolate(x, scale_factor=2), padding=0),
    "padding by a name": lambda: made(lambda x: F.interpolate(x, scale_factor=2), padding="same"),
    "uneven padding": lambda: made(
        lambda x: F.pad(F.interpolate(x, scale_factor=2), (0, 1, 0, 1)), padding=0
    ),
    "groups": lambda: made(lambda x: F.interpolate(x, scale_factor=2), groups=2),
    "written into": lambda: made(written),
    "something between": lambda: made(lambda x: F.interpolate(x, scale_factor=2).relu()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str, replaced: list[int]) -> None:
    check(OTHERS[name](), torch.randn(SIZES[2]))
    assert replaced == [0]


def test_writes_between_are_seen(replaced: list[int]) -> None:
    def late(model: Any, x: Tensor) -> Tensor:
        source = x * 2
        y = F.interpolate(source, scale_factor=2)
        source.add_(1)
        result: Tensor = model.conv(y) + source.mean()
        return result

    check(Made(late, conv=conv()), torch.randn(SIZES[2]))
    assert replaced == [0]


@pytest.mark.parametrize("name", ["_LEAST_PLACES", "_LEAST_PRODUCTS"])
def test_small_images_stay(name: str, replaced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The input has 126 places, and 8 x 8 products of each."""
    model, x = made(lambda x: F.interpolate(x, scale_factor=2)), torch.randn(SIZES[2])
    least = {"_LEAST_PLACES": 126, "_LEAST_PRODUCTS": 126 * 64}[name]
    for more in (0, 1):
        monkeypatch.setattr(upsampling, name, least + more)
        run(model, x)
    assert replaced == [1, 0]


def test_dynamic_sizes_stay(replaced: list[int]) -> None:
    model = made(lambda x: F.interpolate(x, scale_factor=2)).eval()
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS, dynamic=True)
    with torch.no_grad():
        for width in (9, 12):
            x = torch.randn(2, 8, width + 1, width)
            expected = copy.deepcopy(model).double()(x.double())
            assert_close(ours(x), expected, TOLERANCES[torch.float32])
    assert replaced == [0]


@pytest.mark.parametrize("freezing", [False, True])
def test_weights_that_change(freezing: bool, replaced: list[int]) -> None:
    model = made(lambda x: F.interpolate(x, scale_factor=2)).eval()
    options = {**OPTIONS, "freezing": freezing}
    ours, x = torch.compile(model, backend="cudnn_autotune", options=options), torch.randn(SIZES[2])
    with torch.no_grad():
        for _ in range(2):
            for one in model.parameters():
                nn.init.normal_(one)
            expected = copy.deepcopy(model).double()(x.double())
            assert_close(ours(x), expected, TOLERANCES[torch.float32])
    assert set(replaced) == {1}


def test_training_keeps_the_large_image(replaced: list[int]) -> None:
    model, x = made(lambda x: F.interpolate(x, scale_factor=2)), torch.randn(SIZES[2])
    ours = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    ours(x).sum().backward()
    assert sum(replaced) == 0
