"""Convolutions whose filters are put phase by phase in front of a pixel shuffle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from support.models.made import Made
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.compile import shuffles

OPTIONS = {"compare": False, "sampling": "heuristic"}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# PyTorch's layers in a half type.
TIMES, MORE = 2.0, 1e-3


def super_resolution(model: Any, x: Tensor) -> Tensor:
    """The end of EDSR: twice as large, three times as large, colours."""
    y = F.pixel_shuffle(model.doubled(F.relu(model.first(x))), 2)
    result: Tensor = model.last(F.pixel_shuffle(model.tripled(y), 3))
    return result


def upsampler(model: Any, x: Tensor) -> Tensor:
    """LTX-Video's, with a norm of channels, SiLU and a convolution behind it."""
    n, _, t, h, w = x.shape
    y = model.first(x).reshape(n, -1, 2, 2, 2, t, h, w)
    y = y.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)[:, :, 1:]
    result: Tensor = y + model.last(F.silu(F.normalize(y, dim=1) * 8))
    return result


def models() -> dict[str, tuple[nn.Module, tuple[int, ...], int]]:
    """Each with the size of its input, and its number of shuffles with enough numbers."""
    torch.manual_seed(0)
    convs = {
        name: nn.Conv2d(64, kernels, 3, padding=1)
        for name, kernels in (("first", 64), ("doubled", 256), ("tripled", 576), ("last", 3))
    }
    volumes = {
        name: nn.Conv3d(64, kernels, 3, padding=1, bias=kernels > 64)
        for name, kernels in (("first", 512), ("last", 64))
    }
    return {
        "images": (Made(super_resolution, **convs), (1, 64, 130, 140), 2),
        "volumes": (Made(upsampler, **volumes), (1, 64, 6, 40, 44), 1),
    }


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["images", "volumes"])
def test_pixels(
    name: str, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other weights, and in a captured graph."""
    model, size, count = models()[name]
    model, x = model.cuda().to(dtype).eval(), torch.randn(size, device="cuda", dtype=dtype)
    if layout == "channels_last":
        model, x = (one.to(memory_format=LAST[x.dim()]) for one in (model, x))
    ordered: list[Any] = []
    order = shuffles._order_filters
    monkeypatch.setattr(
        shuffles, "_order_filters", lambda *given: (ordered.append(given), order(*given))
    )
    ours = torch.compile(model, backend="cudnn_autotune", dynamic=False, options=OPTIONS)

    def check(found: Tensor) -> None:
        exact = copy.deepcopy(model).float()(x.float())
        theirs = model(x)
        assert relative_error(found, exact) <= TIMES * relative_error(theirs, exact) + MORE

    with torch.no_grad():
        check(ours(x))
        for one in model.parameters():
            one.copy_(one.flip(0))
        check(ours(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ours(x)
        for one in model.parameters():
            one.copy_(one.flip(0))
        graph.replay()
        check(captured)
    assert ca.compilations()[-1].chosen == "cudnn_autotune"
    assert len(ordered) == count
