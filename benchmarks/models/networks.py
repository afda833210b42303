"""Networks that torchvision and timm do not have, of about the sizes in use, by their names."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from models.audio import ConvTasNet, HiFiGAN, Wav2Vec2, WhisperEncoder
from models.images import (
    ESRGAN,
    RIFE,
    Detector,
    DiffusionUNet,
    FrozenResNetFPN,
    StyleGAN2,
    UNet,
    vae_decoder,
)
from models.vocoders import BigVGAN, Demucs, ParallelWaveGAN, dac_decoder, encodec, melgan
from models.volumes import UNet3d, VideoDecoder, VNet

# Name -> the functions that build it, and a tiny one for a dry run.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "sd_unet": (DiffusionUNet, lambda: DiffusionUNet((32, 64), context=76, heads=2)),
    "sd_vae_decoder": (vae_decoder, lambda: vae_decoder((64, 64, 32))),
    "detector": (Detector, lambda: Detector((8, 8, 16, 16, 32))),
    "unet": (UNet, lambda: UNet((8, 8, 16))),
    "stylegan2": (StyleGAN2, lambda: StyleGAN2((8, 8), 512)),
    "esrgan": (ESRGAN, lambda: ESRGAN(8, 4, 1)),
    "unet3d": (UNet3d, lambda: UNet3d((4, 8, 8))),
    "video_decoder": (VideoDecoder, lambda: VideoDecoder((8, 8, 4, 4), 2)),
    "hifigan": (HiFiGAN, lambda: HiFiGAN(16, (4, 2), (3, 5), (1, 3))),
    "conv_tasnet": (ConvTasNet, lambda: ConvTasNet(16, 8, 16, 2, 2)),
    "whisper_encoder": (WhisperEncoder, lambda: WhisperEncoder(16, 1, 2)),
    "wav2vec2": (Wav2Vec2, lambda: Wav2Vec2(8, 16, 1, 2, 8, 2)),
    "encodec": (encodec, lambda: encodec(4, (2, 2))),
    "dac_decoder": (dac_decoder, lambda: dac_decoder(32, (2, 2))),
    "demucs": (Demucs, lambda: Demucs(8, 2)),
    "melgan": (melgan, lambda: melgan(16, (2, 2))),
    "bigvgan": (BigVGAN, lambda: BigVGAN(16, (2, 2))),
    "parallel_wavegan": (ParallelWaveGAN, lambda: ParallelWaveGAN(3, 8)),
    # It is unet3d with one level less and one class more.
    "nnunet3d": (
        lambda: UNet3d((32, 64, 128, 256, 320), classes=4),
        lambda: UNet3d((4, 8, 8), classes=4),
    ),
    "vnet": (VNet, lambda: VNet(4, 2)),
    "rife": (RIFE, lambda: RIFE((8, 4, 4))),
    "ddpm_unet": (
        lambda: DiffusionUNet((128, 256, 256, 512), context=0),
        lambda: DiffusionUNet((32, 64), context=0),
    ),
    "resnet50_fpn": (FrozenResNetFPN, lambda: FrozenResNetFPN("resnet18")),
}
