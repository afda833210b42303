"""Decodes videos as a loader and a server do: loaded weights, tiles, and no search in a request.

    pip install diffusers
    python examples/decode_videos.py --store tuned tune   # once, on a GPU as the server's
    python examples/decode_videos.py --store tuned serve

The decoder is that of Wan, with random weights; ``--tiny`` makes a small one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

import cudnn_autotune

TINY: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}


class Decoder(nn.Module):
    """forward: latents (N, C, T, H, W) -> frames (N, 3, 4 T - 3, 8 H, 8 W), tile by tile."""

    def __init__(self, tile: int, **sizes: Any) -> None:
        super().__init__()
        self.vae = AutoencoderKLWan(**sizes)
        self.vae.enable_tiling(tile, tile, tile * 3 // 4, tile * 3 // 4)

    def forward(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents).sample


def load(weights: Mapping[str, Tensor], like: Tensor, **sizes: Any) -> nn.Module:
    """A decoder for latents of this device and type, as a loader makes it: the names of a
    converted model's weights are those of the plain one."""
    layout = None if like.dtype == torch.float32 else torch.channels_last
    model = cudnn_autotune.convert(Decoder(**sizes).eval(), memory_format=layout)
    model.load_state_dict(weights)
    return model.to(like)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("tune", "serve"))
    parser.add_argument("--store", help="the folder of what is tuned; else the user's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--requests", type=int, default=3)
    options = parser.parse_args()

    on_gpu = options.device == "cuda"
    # A locked store is the authority: what it lacks PyTorch computes, and nothing is searched.
    mode = "read_write" if options.do == "tune" else "locked"
    if on_gpu:
        cudnn_autotune.set_store(options.store, mode=mode)
    sizes = {"tile": 64, **TINY} if options.tiny else {"tile": 256}
    shape = (1, 4, 2, 12, 10) if options.tiny else (1, 16, 6, 60, 104)
    torch.manual_seed(0)
    weights = Decoder(**sizes).state_dict()  # a file's, as safetensors.torch.load_file reads it
    dtype = torch.bfloat16 if on_gpu else torch.float32
    latents = torch.randn(shape).to(options.device, dtype)
    model = load(weights, latents, **sizes)
    print(cudnn_autotune.conversion(model))
    with torch.inference_mode():
        if options.do == "tune":
            print(cudnn_autotune.tune(model, latents, train=False))
            return
        # Kernels that are not kept are compiled before the first request.
        print(cudnn_autotune.prefetch(model, latents))
        for _ in range(options.requests):
            begin = time.perf_counter()
            frames = model(latents).float().cpu()
            ms = (time.perf_counter() - begin) * 1e3
            print(f"{frames.shape[2]} frames in {ms:.0f} ms")
        cudnn_autotune.revert(model)
        expected = model(latents).float().cpu()
    error = float((frames - expected).norm() / expected.norm())
    print(f"they differ from PyTorch's by {error:.1e}")
    model.to("cpu")  # unloaded


if __name__ == "__main__":
    main()
