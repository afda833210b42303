"""Autoencoders of images and videos: classes of diffusers, with random weights.

Configurations are those of Stable Diffusion, FLUX, Qwen-Image, Wan 2.1, LTX-Video, CogVideoX and
HunyuanVideo.
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
from torch import Tensor, nn


@dataclass(frozen=True)
class Autoencoder:
    """A class of diffusers, and its arguments for the published and for a tiny configuration."""

    name: str
    real: dict[str, Any]
    tiny: dict[str, Any]
    ratio: int = 8
    """Pixels of a latent's edge."""
    tiny_ratio: int = 8
    tile: int | None = None
    """Pixels of a tile's edge; None: the class's."""


def _of_images(width: tuple[int, ...], **more: Any) -> dict[str, Any]:
    blocks = {
        "down_block_types": ("DownEncoderBlock2D",) * len(width),
        "up_block_types": ("UpDecoderBlock2D",) * len(width),
    }
    return {"block_out_channels": width, **blocks, **more}


_FLUX = {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
_TINY = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}
_TINY |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
_TINY_BLOCKS: dict[str, Any] = {"block_out_channels": (8, 8, 8, 8), "latent_channels": 4}
_TINY_BLOCKS |= {"layers_per_block": 1, "norm_num_groups": 2}
_IMAGES = (128, 256, 512, 512)
AUTOENCODERS = {
    "sd": Autoencoder(
        "AutoencoderKL",
        _of_images(_IMAGES, layers_per_block=2, latent_channels=4, sample_size=512),
        _of_images((16, 16), norm_num_groups=4, latent_channels=4),
        tiny_ratio=2,
    ),
    "flux": Autoencoder(
        "AutoencoderKL",
        _of_images(_IMAGES, layers_per_block=2, sample_size=1024, **_FLUX),
        _of_images((16, 16), norm_num_groups=4, **_FLUX),
        tiny_ratio=2,
        tile=512,
    ),
    "qwen": Autoencoder("AutoencoderKLQwenImage", {}, _TINY),
    "wan": Autoencoder("AutoencoderKLWan", {}, _TINY),
    "ltx": Autoencoder(
        "AutoencoderKLLTXVideo",
        {},
        {
            "latent_channels": 8,
            **dict.fromkeys(("block_out_channels", "decoder_block_out_channels"), (8,) * 4),
            **dict.fromkeys(("layers_per_block", "decoder_layers_per_block"), (1,) * 5),
        },
        ratio=32,
        tiny_ratio=32,
    ),
    "cogvideox": Autoencoder("AutoencoderKLCogVideoX", {}, _TINY_BLOCKS),
    "hunyuan": Autoencoder("AutoencoderKLHunyuanVideo", {}, _TINY_BLOCKS),
}


class Decoder(nn.Module):
    """forward: latents (N, C, H, W) or (N, C, T, H, W) -> images or videos in pixels."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.autoencoder.decode(latents, return_dict=False)[0]

    def compiled(self, compile: Callable[[nn.Module], Any]) -> nn.Module:
        """Compiles what the class calls for each tile and each group of frames."""
        self.autoencoder.decoder = compile(self.autoencoder.decoder)
        return self


class Encoder(Decoder):
    """forward: images or videos -> the mean and the logarithm of the variance of latents."""

    def forward(self, pixels: Tensor) -> Tensor:
        return self.autoencoder.encode(pixels, return_dict=False)[0].parameters

    def compiled(self, compile: Callable[[nn.Module], Any]) -> nn.Module:
        self.autoencoder.encoder = compile(self.autoencoder.encoder)
        return self


def create(name: str, is_tiny: bool) -> nn.Module:
    """Returns a decoder or an encoder by its name in ``cases.DECODERS``."""
    known, direction, *tiled = name.split("_")
    one = AUTOENCODERS[known]
    autoencoder = getattr(diffusers, one.name)(**(one.tiny if is_tiny else one.real))
    for kind in {type(module) for module in autoencoder.modules()}:
        if kind.__name__ in _TELL_STRINGS:
            _tell_strings_by_type(kind)
    if tiled:
        autoencoder.enable_tiling()
        if is_tiny:
            _set_tiles(autoencoder, 3 * one.tiny_ratio, one.tiny_ratio)
        elif one.tile is not None:
            _set_tiles(autoencoder, one.tile, one.ratio)
    return (Decoder if direction == "decode" else Encoder)(autoencoder).eval()


_TELL_STRINGS = ("WanResample", "QwenImageResample")


@functools.cache
def _tell_strings_by_type(kind: type) -> None:
    """Lets a class tell a cache of frames from the string "Rep" by its type.

    Where a tensor is compared with a string, Dynamo of torch 2.11 breaks the graph, and compiles
    more graphs in the second call. Newer versions have whole graphs either way.
    """
    source = textwrap.dedent(inspect.getsource(kind.forward))
    source = source.replace('feat_cache[idx] == "Rep"', "isinstance(feat_cache[idx], str)")
    source = source.replace('feat_cache[idx] != "Rep"', "not isinstance(feat_cache[idx], str)")
    made: dict[str, Any] = {}
    exec(source, vars(sys.modules[kind.__module__]), made)
    kind.forward = made["forward"]


def _set_tiles(autoencoder: Any, edge: int, ratio: int) -> None:
    """Sets the edge of a tile, in pixels: a class has some of these attributes."""
    for kind, size in (("sample_min", edge), ("latent_min", edge // ratio)):
        for side in ("size", "height", "width"):
            _replace(autoencoder, f"tile_{kind}_{side}", size)
    for side in ("height", "width"):
        _replace(autoencoder, f"tile_sample_stride_{side}", edge - ratio)


def _replace(autoencoder: Any, name: str, value: int) -> None:
    if hasattr(autoencoder, name):
        setattr(autoencoder, name, value)
