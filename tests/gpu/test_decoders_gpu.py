"""Decoders of videos that keep the last frames of each layer for the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import relative_error
from torch import Tensor, nn

import cudnn_autotune as ca

OPTIONS = {"compare": False, "sampling": "heuristic"}
# Of bfloat16, by PyTorch's layers.
TIMES, MORE = 2.0, 1e-3


class Streaming(nn.Module):
    """Layers with a norm of channels, SiLU and a causal convolution; some frames are convolved one
    by one behind them. forward: frames, and two frames for each layer -> frames, and the same."""

    def __init__(self, channels: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv3d(channels, channels, 3) for _ in range(layers))
        self.last = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, *earlier: Tensor) -> tuple[Tensor, ...]:
        caches = []
        for conv, cache in zip(self.convs, earlier, strict=True):
            y = F.silu(F.normalize(x.float(), dim=1).to(x.dtype) * 8)
            caches.append(y[:, :, -2:].clone())
            x = x + conv(F.pad(torch.cat([cache, y], 2), (1, 1, 1, 1)))
        frames = self.last(x.transpose(1, 2).flatten(0, 1))
        return (frames.unflatten(0, (x.shape[0], -1)).transpose(1, 2), *caches)


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most memory of a call that has run before, beside what is there."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def assert_as_good(found: Tensor, theirs: Tensor, exact: Tensor) -> None:
    assert relative_error(found, exact) <= TIMES * relative_error(theirs, exact) + MORE


@pytest.mark.parametrize("frames", [1, 4])
def test_frames_with_those_of_the_call_before(frames: int) -> None:
    model = Streaming().cuda().bfloat16().eval()
    sizes = [frames, *[2] * len(model.convs)]
    inputs = [torch.randn(1, 64, t, 120, 160, device="cuda").bfloat16() for t in sizes]
    plain = torch.compile(copy.deepcopy(model), dynamic=False)
    ours = torch.compile(
        copy.deepcopy(model), backend="cudnn_autotune", dynamic=False, options=OPTIONS
    )
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(*(x.float() for x in inputs))
        theirs, found = model(*inputs), ours(*inputs)
        for one, other, right in zip(found, theirs, exact, strict=True):
            assert_as_good(one, other, right)
            assert one.stride() == other.stride()
        assert ca.compilations()[-1].chosen == "cudnn_autotune"
        most = peak_bytes(lambda: plain(*inputs))
        assert peak_bytes(lambda: ours(*inputs)) <= 1.05 * most


@pytest.mark.parametrize("way", ["convert", "backend"])
def test_the_decoder_of_wan(way: str) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    sizes = {"base_dim": 32, "z_dim": 4, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}
    vae = diffusers.AutoencoderKLWan(**sizes).cuda().bfloat16().eval()
    latents = torch.randn(1, 4, 4, 20, 14, device="cuda").bfloat16()
    with torch.no_grad():
        exact = copy.deepcopy(vae).float().decode(latents.float()).sample
        theirs = vae.decode(latents).sample
        if way == "convert":
            ca.convert(vae, memory_format=torch.channels_last, sampling="heuristic")
        else:
            options = {"backend": "cudnn_autotune", "dynamic": False, "options": OPTIONS}
            vae.decoder = torch.compile(vae.decoder, **options)
        assert_as_good(vae.decode(latents).sample, theirs, exact)
        if way == "convert":  # each size of a tile would be compiled
            vae.enable_tiling(96, 96, 72, 72)
            assert vae.decode(latents).sample.isfinite().all()
