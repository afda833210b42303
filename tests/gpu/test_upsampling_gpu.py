"""Convolutions of size 1 that read the image from which nearest neighbours make a larger one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from support.models.made import ConditionedNorm, Made
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.compile import upsampling

OPTIONS = {"compare": False, "sampling": "heuristic"}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "images": ((2, 4, 31, 33), (2, 128, 124, 132)),
    "volumes": ((1, 16, 3, 15, 20), (1, 64, 9, 60, 80)),
}
"""Sizes of the latents and of the image."""
# PyTorch's layers in a half type.
TIMES, MORE = 2.0, 1e-3


def made(latents: int, channels: int, dims: int) -> nn.Module:
    """A norm of Kandinsky's MoVQ, or of CogVideoX, and a convolution."""

    def forward(model: Any, latents: Tensor, x: Tensor) -> Tensor:
        output: Tensor = model.last(model.norm(x, _larger(latents, x.shape[2:])))
        return output

    last = getattr(nn, f"Conv{dims}d")(channels, 48, 3, padding=1)
    return Made(forward, norm=ConditionedNorm(latents, channels, dims), last=last)


def _larger(latents: Tensor, size: Sequence[int]) -> Tensor:
    if latents.dim() == 4:
        return F.interpolate(latents, size=list(size))
    sizes = ((1, *size[1:]), (size[0] - 1, *size[1:]))
    parts = (latents[:, :, :1], latents[:, :, 1:])
    pairs = zip(parts, sizes, strict=True)
    return torch.cat([F.interpolate(part, size=one) for part, one in pairs], dim=2)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_values(
    name: str, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other weights, and in a captured graph."""
    torch._dynamo.reset()  # it compiles a function eight times, then no more
    torch.manual_seed(0)
    inputs = [torch.randn(size, device="cuda", dtype=dtype) for size in SIZES[name]]
    channels, dims = [one.shape[1] for one in inputs], inputs[0].dim() - 2
    model = made(*channels, dims).cuda().to(dtype).eval()
    if layout == "channels_last":
        model = model.to(memory_format=LAST[dims + 2])
        inputs = [one.to(memory_format=LAST[dims + 2]) for one in inputs]
    read: list[tuple[int, ...]] = []
    layout_of = upsampling.conv_memory_format

    def recorded(input: Tensor, weight: Tensor) -> torch.memory_format:
        read.append(tuple(input.shape))
        return layout_of(input, weight)

    monkeypatch.setattr(upsampling, "conv_memory_format", recorded)
    ours = torch.compile(model, backend="cudnn_autotune", dynamic=False, options=OPTIONS)

    def check(result: Tensor) -> None:
        exact = copy.deepcopy(model).double()(*(one.double() for one in inputs))
        theirs = model(*inputs)
        more = MORE if dtype != torch.float32 else 1e-6
        assert relative_error(result, exact) <= TIMES * relative_error(theirs, exact) + more
        assert result.stride() == theirs.stride()

    with torch.no_grad():
        check(ours(*inputs))
        for one in model.parameters():
            one.copy_(one.flip(0))
        check(ours(*inputs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ours(*inputs)
        for one in model.parameters():
            one.copy_(one.flip(0))
        graph.replay()
        check(captured)
    assert ca.compilations()[-1].chosen == "cudnn_autotune"
    assert set(read) == {SIZES[name][0]}
