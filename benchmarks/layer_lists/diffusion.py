"""The two networks of Stable Diffusion 1.5 that have convolutions."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from layer_lists.network import FIRST, Network, Wanted


def sd_unet() -> torch.nn.Module:
    """With unet/config.json of Stable Diffusion 1.5; what is not named is diffusers' default."""
    return diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)


def sd_unet_forward(unet: torch.nn.Module, latents: torch.Tensor) -> Any:
    batch = latents.shape[0]
    return unet(latents, torch.empty(batch), torch.empty(batch, 77, 768))


def sd_vae() -> torch.nn.Module:
    """With vae/config.json of Stable Diffusion 1.5."""
    return diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        sample_size=512,
    )


NETWORKS = (
    Network(
        "Stable Diffusion 1.5 UNet",
        "diffusers",
        sd_unet,
        (4, 64, 64),
        (
            Wanted("sd_unet_in", "conv_in", 16, False, FIRST),
            Wanted("sd_unet_down_320", "down_blocks.0.resnets.0.conv1", 16, True),
            Wanted("sd_unet_down_320_stride2", "down_blocks.0.downsamplers.0.conv", 4),
            Wanted("sd_unet_down_640", "down_blocks.1.resnets.0.conv2", 4),
            Wanted("sd_unet_down_1280", "down_blocks.2.resnets.0.conv2", 4),
            Wanted("sd_unet_up_2560_batch2", "up_blocks.0.resnets.0.conv1", 2),
            Wanted("sd_unet_up_960", "up_blocks.3.resnets.0.conv1", 4, True),
            Wanted("sd_unet_up_960_shortcut", "up_blocks.3.resnets.0.conv_shortcut", 4),
        ),
        sd_unet_forward,
    ),
    Network(
        "Stable Diffusion 1.5 VAE decoder",
        "diffusers",
        sd_vae,
        (4, 64, 64),
        (
            Wanted("vae_decoder_mid_512", "decoder.mid_block.resnets.0.conv1", 1),
            Wanted("vae_decoder_upsample_512", "decoder.up_blocks.1.upsamplers.0.conv", 1),
            Wanted("vae_decoder_128", "decoder.up_blocks.3.resnets.0.conv2", 1, True),
            Wanted("vae_decoder_shortcut", "decoder.up_blocks.3.resnets.0.conv_shortcut", 1),
            Wanted("vae_decoder_out", "decoder.conv_out", 1),
        ),
        lambda vae, latents: vae.decode(latents),
    ),
)
