"""Convolutions of size 1 behind nearest neighbours read the small image, and results stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile.rewritten import LAST, OPTIONS, check_changing_weights, run
from support.conv.references import TOLERANCES, assert_close
from support.models.made import ConditionedNorm, Made
from torch import Tensor, nn
from torch.fx import GraphModule

import cudnn_autotune as ca
from cudnn_autotune.compile import programs, upsampling

pytestmark = pytest.mark.usefixtures("on_cpu")

SIZES = {2: (2, 8, 9, 7), 3: (2, 8, 3, 5, 4)}


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of convolutions of each compiled program that read a small image."""
    found: list[int] = []

    def count(graph: GraphModule) -> None:
        upsampling.convolve_before_upsampling(graph)
        targets = [node.target for node in graph.graph.nodes]
        found.append(targets.count(upsampling.conv_before_upsampling))

    monkeypatch.setattr(programs, "convolve_before_upsampling", count)
    return found


def made(up: Callable[[Tensor], Tensor], dims: int = 2, **options: Any) -> nn.Module:
    """A convolution of size 1, unless options say something else, and a product with its output."""
    layer = getattr(nn, f"Conv{dims}d")(8, 12, **{"kernel_size": 1, **options})
    return Made(lambda model, x: F.silu(2 * model.conv(up(x))), conv=layer)


def frames(z: Tensor, *sizes: tuple[int, int, int]) -> Tensor:
    """The first frame and the others are made larger for themselves, as in CogVideoX."""
    parts = (z[:, :, :1], z[:, :, 1:])
    return torch.cat([F.interpolate(z, size=size) for z, size in zip(parts, sizes, strict=True)], 2)


def conditioned(dims: int) -> nn.Module:
    """A decoder's norm, whose input, too, is the large image; it returns that image as well."""

    def forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        large = F.interpolate(x, scale_factor=2)
        return model.last(model.norm(large.cos(), large)), large

    last = getattr(nn, f"Conv{dims}d")(8, 4, 3, padding=1)
    return Made(forward, norm=ConditionedNorm(8, 8, dims, groups=2), last=last)


MODELS: dict[str, Callable[[], tuple[nn.Module, int, int]]] = {
    # The model, its dimensions, and how many convolutions read the small image.
    "module": lambda: (nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 1)), 2, 1),
    "no bias": lambda: (made(lambda x: F.interpolate(x, scale_factor=2.0), bias=False), 2, 1),
    "size": lambda: (made(lambda x: F.interpolate(x, size=(20, 15))), 2, 1),
    "factor 2.5": lambda: (made(lambda x: F.interpolate(x, scale_factor=2.5)), 2, 1),
    "exact": lambda: (
        made(lambda x: F.interpolate(x, size=(20, 15), mode="nearest-exact")),
        2,
        1,
    ),
    "rows": lambda: (made(lambda x: F.interpolate(x, scale_factor=(2, 1))), 2, 1),
    "groups": lambda: (made(lambda x: F.interpolate(x, scale_factor=2), groups=4), 2, 1),
    "named padding": lambda: (
        made(lambda x: F.interpolate(x, scale_factor=2), padding="valid"),
        2,
        1,
    ),
    "volumes": lambda: (made(lambda x: F.interpolate(x, scale_factor=2), 3), 3, 1),
    "frames": lambda: (made(lambda z: frames(z, (1, 10, 8), (4, 10, 8)), 3), 3, 1),
    "halves": lambda: (
        made(
            lambda z: torch.cat(
                tensors=[
                    F.interpolate(z[:, :, :, half], scale_factor=2)
                    for half in (slice(3, None), slice(3))
                ],
                axis=-1,
            )
        ),
        2,
        1,
    ),
    "norm of images": lambda: (conditioned(2), 2, 2),
    "norm of volumes": lambda: (conditioned(3), 3, 2),
}


def check(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Compares values with float64, and the layout with the input's, as PyTorch's on a GPU is."""
    model = model.eval()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    found = run(model, x, **options)
    listed = [[one] if isinstance(one, Tensor) else one for one in (found, exact)]
    for mine, expected in zip(*listed, strict=True):
        assert_close(mine, expected, TOLERANCES[x.dtype])
        assert mine.is_contiguous(memory_format=torch._prims_common.suggest_memory_format(x))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, layout: str, replaced: list[int]) -> None:
    model, dims, expected = MODELS[name]()
    x = torch.randn(SIZES[dims])
    if layout == "channels_last":
        model, x = (one.to(memory_format=LAST[x.dim()]) for one in (model, x))
    check(model, x)
    assert replaced == [expected]


def test_a_graph_that_is_laid_out(replaced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "favours_channels_last", lambda graph: True)
    check(conditioned(3), torch.randn(SIZES[3]))
    assert replaced == [2]


def written(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2).add_(1)


def narrow(x: Tensor) -> Tensor:
    """Slices of channels, each made larger."""
    return torch.cat([F.interpolate(x[:, i : i + 4], scale_factor=2) for i in (0, 4)], dim=1)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "bilinear": lambda: made(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    "smaller": lambda: made(lambda x: F.interpolate(x, scale_factor=0.5)),
    "little larger": lambda: made(lambda x: F.interpolate(x, size=(10, 8))),
    "3 taps": lambda: made(lambda x: F.interpolate(x, scale_factor=2), kernel_size=3),
    "stride": lambda: made(lambda x: F.interpolate(x, scale_factor=2), stride=2),
    "padding": lambda: made(lambda x: F.interpolate(x, scale_factor=2), padding=1),
    "channels": lambda: made(narrow),
    "written into": lambda: made(written),
    "something between": lambda: made(lambda x: F.interpolate(x, scale_factor=2).relu()),
    "columns of an ellipsis": lambda: made(
        lambda x: torch.cat(
            [F.interpolate(x[..., one], scale_factor=2) for one in (slice(4, 7), slice(4))], -1
        )
    ),
    "another image": lambda: made(
        lambda x: torch.cat([F.interpolate(one, scale_factor=2) for one in (x, 2 * x)], dim=2)
    ),
    "a part as it is": lambda: made(
        lambda x: torch.cat([F.interpolate(x, scale_factor=(4, 1)), x], dim=2)
    ),
    "one channel": lambda: made(
        lambda x: F.interpolate(x.mean(1, keepdim=True), scale_factor=2).expand(-1, 8, -1, -1)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str, replaced: list[int]) -> None:
    check(OTHERS[name](), torch.randn(SIZES[2]))
    assert replaced == [0]


def test_one_image_without_a_batch_stays(replaced: list[int]) -> None:
    """Its rows are channels for the upsampling."""
    check(made(lambda x: F.interpolate(x, scale_factor=2)), torch.randn(SIZES[2][1:]))
    assert replaced == [0]


def test_values_that_are_not_finite_are_pytorch_s(replaced: list[int]) -> None:
    model, x = made(lambda x: F.interpolate(x, scale_factor=2)).eval(), torch.randn(SIZES[2])
    x[0, 3, 2, 2], x[1, 1, 1, 1] = torch.nan, torch.inf
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(run(model, x).isnan(), expected.isnan())
    assert replaced == [1]


def test_writes_between_are_seen(replaced: list[int]) -> None:
    def late(model: Any, x: Tensor) -> Tensor:
        source = x * 2
        y = F.interpolate(source, scale_factor=2)
        source.add_(1)
        result: Tensor = model.conv(y) + source.mean()
        return result

    check(Made(late, conv=nn.Conv2d(8, 8, 1)), torch.randn(SIZES[2]))
    assert replaced == [0]


def test_renormalised_embeddings_are_seen(replaced: list[int]) -> None:
    def late(model: Any, x: Tensor) -> Tensor:
        words = x.reshape(16, 63).clone()
        y = F.interpolate(words.view(2, 8, 9, 7), scale_factor=2)
        found = F.embedding(torch.arange(3), words, max_norm=0.01)
        result: Tensor = model.conv(y) + found.sum()
        return result

    check(Made(late, conv=nn.Conv2d(8, 8, 1)), torch.randn(SIZES[2]))
    assert replaced == [0]


def test_running_statistics_are_seen(replaced: list[int]) -> None:
    def late(model: Any, x: Tensor) -> Tensor:
        source = x * 2
        y = F.interpolate(source, scale_factor=2)
        mean, var = source[:, :, 0, 0]
        found = F.batch_norm(x, mean, var, training=True).square()
        result: Tensor = model.conv(y) + found.sum()
        return result

    check(Made(late, conv=nn.Conv2d(8, 8, 1)), torch.randn(SIZES[2]))
    assert replaced == [0]


DYNAMIC: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "dimension": lambda x, w, n: F.conv2d(torch.cat([x, x], dim=n), w[:, :, :1, :1]),
    "stride": lambda x, w, n: F.conv2d(F.interpolate(x, scale_factor=2), w, stride=n),
    "padding": lambda x, w, n: F.conv2d(F.interpolate(x, scale_factor=2), w, padding=n),
    "weight": lambda x, w, n: F.conv2d(F.interpolate(x, scale_factor=2), w) * n,
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_numbers_that_vary(name: str, replaced: list[int]) -> None:
    function = DYNAMIC[name]
    ours = torch.compile(function, backend="cudnn_autotune", options=OPTIONS, dynamic=True)
    x, w = torch.randn(SIZES[2]), torch.randn(6, 8, 3, 3)
    with torch.no_grad():
        assert_close(ours(x, w, 2), function(x.double(), w.double(), 2), TOLERANCES[torch.float32])
    assert replaced == [0]
    assert ca.compilations()[-1].chosen == "cudnn_autotune", ca.compilations()[-1].note


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
    check_changing_weights(model, torch.randn(SIZES[2]), freezing=freezing)
    assert set(replaced) == {1}
