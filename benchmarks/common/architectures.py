"""Well-known architectures of torchvision and timm, each with an input."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

TORCHVISION = """alexnet vgg11_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121
googlenet inception_v3 squeezenet1_1 shufflenet_v2_x1_0 mobilenet_v2 mobilenet_v3_large mnasnet1_0
efficientnet_b0 efficientnet_v2_s regnet_y_400mf convnext_tiny vit_b_16 swin_t maxvit_t
fcn_resnet50 deeplabv3_resnet50 lraspp_mobilenet_v3_large r3d_18 mc3_18 r2plus1d_18 s3d"""
TIMM = """tf_efficientnet_b0 tf_efficientnet_cc_b0_4e mixnet_s tf_mixnet_s resnetv2_50x1_bit
nfnet_l0 dm_nfnet_f0 resnetblur50 mobilevit_s mobilevitv2_050 halonet26t botnet26t_256 ghostnet_100
hrnet_w18_small dla34 res2net50_26w_4s resnest14d skresnet18 ese_vovnet19b_dw cspresnet50 repvgg_a0
fastvit_t8 efficientvit_b0 edgenext_xx_small coat_tiny levit_128 poolformer_s12 xception41
inception_resnet_v2 lcnet_050 fbnetc_100 hardcorenas_a darknet53 gernet_s selecsls42b rexnet_100
regnety_004 tiny_vit_5m_224 vit_small_r26_s32_224"""
ARCHITECTURES = [f"torchvision:{name}" for name in TORCHVISION.split()]
ARCHITECTURES += [f"timm:{name}" for name in TIMM.split()]

_SIDES = {"inception_v3": 299, "s3d": 224}


def create(name: str, batch: int, size: int, device: str) -> tuple[Any, Any]:
    """The model of ``torchvision:NAME`` or ``timm:NAME`` with random weights, and random images (or
    clips) for it, ``size`` pixels wide and high; 0 stands for the size that it is made for."""
    import torch

    source, _, name = name.partition(":")
    torch.manual_seed(0)
    if source == "timm":
        model = importlib.import_module("timm").create_model(name)
        shape = list(model.default_cfg["input_size"])
    else:
        models = importlib.import_module("torchvision").models
        builder = models.get_model_builder(name)
        options = [o for o in inspect.signature(builder).parameters if o.startswith("weights")]
        model = builder(**dict.fromkeys(options))
        is_video = builder.__module__.startswith("torchvision.models.video")
        side = _SIDES.get(name, 112 if is_video else 224)
        shape = [3, 16, side, side] if is_video else [3, side, side]
    if size:
        shape[-2:] = size, size
    return model.to(device), torch.randn(batch, *shape, device=device)
