"""Convolutions that read the image from which nearest neighbours make a larger one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from support.models.made import Made
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.compile import upsampling

OPTIONS = {"compare": False, "sampling": "heuristic"}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# PyTorch's layers in a half type.
TIMES, MORE = 2.0, 1e-3


def decoder(model: Any, x: Tensor) -> Tensor:
    """Two levels of Stable Diffusion's, the second one converted as in Wan's."""
    y = model.first(F.interpolate(x, scale_factor=2.0, mode="nearest"))
    y = y + model.block(F.silu(model.norm(y)))
    y = F.interpolate(y.float(), scale_factor=(2.0, 2.0), mode="nearest-exact").type_as(y)
    result: Tensor = model.last(F.silu(model.second(y)))
    return result


def volumes(model: Any, x: Tensor) -> Tensor:
    """A causal convolution of frames that are made larger, and one of larger volumes."""
    y = F.interpolate(x, scale_factor=(1.0, 2.0, 2.0))
    y = F.silu(model.causal(F.pad(y, (1, 1, 1, 1, 2, 0))))
    result: Tensor = model.last(F.interpolate(y, size=[2 * one for one in y.shape[2:]]))
    return result


def models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Each with the size of its input. Two convolutions read what is made larger."""
    torch.manual_seed(0)
    conv: Callable[..., nn.Module] = nn.Conv2d
    images = {
        **{name: conv(128, 128, 3, padding=1) for name in ("first", "block")},
        "norm": nn.GroupNorm(32, 128),
        "second": conv(128, 64, 3, padding=1, bias=False),
        "last": conv(64, 3, 3, padding=1),
    }
    layers = {"causal": nn.Conv3d(96, 96, 3), "last": nn.Conv3d(96, 48, 3, padding=1)}
    return {
        "images": (Made(decoder, **images), (2, 128, 63, 65)),
        "volumes": (Made(volumes, **layers), (1, 96, 5, 40, 41)),
    }


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", models())
def test_values(
    name: str, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other weights, and in a captured graph."""
    model, size = models()[name]
    model, x = model.cuda().to(dtype).eval(), torch.randn(size, device="cuda", dtype=dtype)
    if layout == "channels_last":
        model, x = (one.to(memory_format=LAST[x.dim()]) for one in (model, x))
    monkeypatch.setattr(upsampling, "_LEAST_PRODUCTS", 0)
    found: list[Any] = []
    interleave = upsampling._interleaved
    monkeypatch.setattr(
        upsampling, "_interleaved", lambda *given: (found.append(given), interleave(*given))[1]
    )
    ours = torch.compile(model, backend="cudnn_autotune", dynamic=False, options=OPTIONS)

    def check(result: Tensor) -> None:
        exact = copy.deepcopy(model).double()(x.double())
        theirs = model(x)
        more = MORE if dtype != torch.float32 else 1e-6
        assert relative_error(result, exact) <= TIMES * relative_error(theirs, exact) + more
        assert result.stride() == theirs.stride()

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
    assert len(found) >= 2
