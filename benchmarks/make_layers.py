"""Writes the layer lists: layers.json beside this script, and the short one that the package ships.

The shapes are read off the real networks: torchvision's and diffusers' models run on the meta
device, where nothing is computed and no weights are loaded, and a hook notes what each wanted
convolution was given. YOLOv8 and the 3-D U-Net are in neither library: `PUBLISHED` has their
layers, worked out from the definitions that it names.

Needs `torchvision` and `diffusers`; each layer's `source` has the version that was used. The same
versions write the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import torchvision
from torchvision.models import segmentation, video

HERE = Path(__file__).resolve().parent
FULL = HERE / "layers.json"
SHORT = HERE.parent / "cudnn_autotune" / "audit" / "layers_default.json"

# Nothing needs the gradient of images, nor that of the latents that a diffusion model is given.
FIRST = ("fprop", "wgrad")
ALSO = ["bfloat16", "float32"]
DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}

ABOUT = (
    "Convolution layers of real networks, by make_layers.py. input_shape is [N, C, *spatial], "
    "weight_shape [K, C / groups, *kernel]; stride, padding (default 0), dilation and groups "
    "(default 1) are ints, the first three also lists with one entry per spatial dimension. dtype "
    "is float16 (also: further ones; float32 may use TF32), channels_last is true, ops are fprop, "
    "dgrad and wgrad, unless a layer says otherwise."
)
ABOUT_SHORT = f"A short cut through benchmarks/layers.json. {ABOUT}"

SHORT_NAMES = (
    "resnet50_layer1_3x3",
    "resnet50_layer2_3x3_stride2",
    "resnet50_layer4_3x3",
    "resnext50_layer2_group_stride2",
    "convnext_t_stage3_depthwise",
    "mobilenetv3_block13_depthwise_5x5_stride2",
    "sd_unet_down_1280",
    "yolov8l_head_class_batch1",
    "deeplabv3_aspp_12",
    "unet3d_analysis2",
)


@dataclass(frozen=True)
class Wanted:
    """A layer to list: its name here, the module's name in the model, the batch."""

    name: str
    module: str
    batch: int
    also: bool = False
    ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    title: str
    library: str
    build: Callable[[], torch.nn.Module]
    size: tuple[int, ...]
    """Of one input, with its channels."""
    wanted: Sequence[Wanted]
    forward: Callable[[torch.nn.Module, torch.Tensor], Any] = torch.nn.Module.__call__

    @property
    def version(self) -> str:
        return {"torchvision": torchvision, "diffusers": diffusers}[self.library].__version__


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
        "ResNet-50",
        "torchvision",
        torchvision.models.resnet50,
        (3, 224, 224),
        (
            Wanted("resnet50_conv1", "conv1", 64, True, FIRST),
            Wanted("resnet50_layer1_1x1", "layer1.0.conv3", 64),
            Wanted("resnet50_layer1_3x3", "layer1.1.conv2", 64, True),
            Wanted("resnet50_layer2_3x3_stride2", "layer2.0.conv2", 64),
            Wanted("resnet50_layer2_down", "layer2.0.downsample.0", 64, True),
            Wanted("resnet50_layer3_3x3", "layer3.1.conv2", 128, True),
            Wanted("resnet50_layer3_3x3_batch1", "layer3.1.conv2", 1),
            Wanted("resnet50_layer4_1x1", "layer4.1.conv1", 64, True),
            Wanted("resnet50_layer4_3x3", "layer4.1.conv2", 64),
        ),
    ),
    Network(
        "VGG-16",
        "torchvision",
        torchvision.models.vgg16,
        (3, 224, 224),
        (
            Wanted("vgg16_conv3_2", "features.12", 64),
            Wanted("vgg16_conv4_2", "features.19", 128, True),
        ),
    ),
    Network(
        "ResNeXt-50 32x4d",
        "torchvision",
        torchvision.models.resnext50_32x4d,
        (3, 224, 224),
        (
            Wanted("resnext50_layer1_group", "layer1.1.conv2", 32, True),
            Wanted("resnext50_layer2_group_stride2", "layer2.0.conv2", 32),
            Wanted("resnext50_layer4_group", "layer4.1.conv2", 32),
        ),
    ),
    Network(
        "Inception v3",
        "torchvision",
        lambda: torchvision.models.inception_v3(init_weights=False),
        (3, 299, 299),
        (
            Wanted("inceptionv3_5x5", "Mixed_5b.branch5x5_2.conv", 64),
            Wanted("inceptionv3_1x7", "Mixed_6e.branch7x7_2.conv", 64),
        ),
    ),
    Network(
        "EfficientNetV2-S",
        "torchvision",
        torchvision.models.efficientnet_v2_s,
        (3, 300, 300),
        (
            Wanted("efficientnetv2_s_stem", "features.0.0", 32, False, FIRST),
            Wanted("efficientnetv2_s_stage2_fused", "features.2.1.block.0.0", 32, True),
            Wanted("efficientnetv2_s_stage2_project", "features.2.1.block.1.0", 32),
            Wanted("efficientnetv2_s_stage4_depthwise_stride2", "features.4.0.block.1.0", 32),
            Wanted("efficientnetv2_s_stage5_depthwise", "features.5.1.block.1.0", 32, True),
            Wanted("efficientnetv2_s_stage6_expand", "features.6.1.block.0.0", 32),
        ),
    ),
    Network(
        "ConvNeXt-T",
        "torchvision",
        torchvision.models.convnext_tiny,
        (3, 224, 224),
        (
            Wanted("convnext_t_stem", "features.0.0", 32, False, FIRST),
            Wanted("convnext_t_stage1_depthwise", "features.1.0.block.0", 32, True),
            Wanted("convnext_t_stage3_depthwise", "features.5.0.block.0", 32),
            Wanted("convnext_t_down3", "features.6.1", 32, True),
        ),
    ),
    Network(
        "ConvNeXt-B",
        "torchvision",
        torchvision.models.convnext_base,
        (3, 224, 224),
        (
            Wanted("convnext_b_stage2_depthwise_batch8", "features.3.0.block.0", 8),
            Wanted("convnext_b_down1_batch8", "features.2.1", 8),
        ),
    ),
    Network(
        "MobileNetV3-Large",
        "torchvision",
        torchvision.models.mobilenet_v3_large,
        (3, 224, 224),
        (
            Wanted("mobilenetv3_stem", "features.0.0", 128, False, FIRST),
            Wanted("mobilenetv3_block2_depthwise_stride2", "features.2.block.1.0", 128),
            Wanted("mobilenetv3_block5_depthwise_5x5", "features.5.block.1.0", 128, True),
            Wanted("mobilenetv3_block13_depthwise_5x5_stride2", "features.13.block.1.0", 128),
            Wanted("mobilenetv3_block12_expand", "features.12.block.0.0", 128, True),
            Wanted("mobilenetv3_block12_squeeze", "features.12.block.2.fc1", 128),
        ),
    ),
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
    Network(
        "DeepLabV3 ResNet-50",
        "torchvision",
        lambda: segmentation.deeplabv3_resnet50(weights_backbone=None),
        (3, 520, 520),
        (
            Wanted("deeplabv3_layer4_dilation4", "backbone.layer4.1.conv2", 8),
            Wanted("deeplabv3_aspp_12", "classifier.0.convs.1.0", 4),
            Wanted("deeplabv3_aspp_24", "classifier.0.convs.2.0", 4, True),
            Wanted("deeplabv3_aspp_36", "classifier.0.convs.3.0", 4),
            Wanted("deeplabv3_aspp_project", "classifier.0.project.0", 8),
        ),
    ),
    Network(
        "R(2+1)D-18",
        "torchvision",
        video.r2plus1d_18,
        (3, 16, 112, 112),
        (
            Wanted("r2plus1d_layer1_spatial", "layer1.0.conv1.0.0", 16, True),
            Wanted("r2plus1d_layer2_temporal_stride2", "layer2.0.conv1.0.3", 16),
        ),
    ),
    Network(
        "R3D-18",
        "torchvision",
        video.r3d_18,
        (3, 16, 112, 112),
        (Wanted("r3d_layer1_3x3x3", "layer1.0.conv1.0", 16),),
    ),
)


@dataclass(frozen=True)
class Published:
    name: str
    module: str
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    also: bool = False
    ops: tuple[str, ...] = ()


PUBLISHED = {
    # C2f blocks of 3, 6, 6, 3 bottlenecks of half the block's width: their last convolution joins
    # 2 + that many halves. The class branch is as wide as the finest map: 256.
    "YOLOv8-l, ultralytics' yolov8.yaml (depth 1, width 1, at most 512 channels), 640x640": (
        Published("yolov8l_stem", "model.0", (16, 3, 640, 640), (64, 3, 3, 3), 2, 1, ops=FIRST),
        Published("yolov8l_down1", "model.1", (16, 64, 320, 320), (128, 64, 3, 3), 2, 1),
        Published(
            "yolov8l_c2f4_3x3", "model.4.m.0.cv1", (16, 128, 80, 80), (128, 128, 3, 3), 1, 1, True
        ),
        Published("yolov8l_c2f4_join", "model.4.cv2", (16, 1024, 80, 80), (256, 1024, 1, 1)),
        Published(
            "yolov8l_head_class_batch1",
            "model.22.cv3.0.0",
            (1, 256, 80, 80),
            (256, 256, 3, 3),
            padding=1,
            also=True,
        ),
        Published(
            "yolov8l_head_logits_batch1", "model.22.cv3.0.2", (1, 256, 80, 80), (80, 256, 1, 1)
        ),
    ),
    # No padding: every 3x3x3 takes two voxels off each side's length, from 132x132x116 to 44x44x28.
    "3-D U-Net, figure 2 of arXiv:1606.06650, 132x132x116": (
        Published(
            "unet3d_first",
            "analysis 1, first",
            (1, 3, 132, 132, 116),
            (32, 3, 3, 3, 3),
            ops=FIRST,
        ),
        Published(
            "unet3d_analysis1", "analysis 1, second", (1, 32, 130, 130, 114), (64, 32, 3, 3, 3)
        ),
        Published(
            "unet3d_analysis2",
            "analysis 2, second",
            (1, 64, 62, 62, 54),
            (128, 64, 3, 3, 3),
            also=True,
        ),
        Published(
            "unet3d_bottom",
            "analysis 4, second",
            (1, 256, 11, 11, 9),
            (512, 256, 3, 3, 3),
            also=True,
        ),
        Published(
            "unet3d_synthesis1", "synthesis 1, first", (1, 192, 48, 48, 32), (64, 192, 3, 3, 3)
        ),
    ),
}


def entry(name: str, source: str, shapes: Sequence[Sequence[int]], **more: Any) -> dict[str, Any]:
    """A layer as the lists have it: what is at its default is left out."""
    written = {"name": name, "source": source}
    written |= {"input_shape": list(shapes[0]), "weight_shape": list(shapes[1])}
    for field, default in DEFAULTS.items():
        value = more[field]
        if isinstance(value, tuple):
            value = value[0] if len(set(value)) == 1 else list(value)
        if value != default:
            written[field] = value
    if more["also"]:
        written["also"] = ALSO
    if more["ops"]:
        written["ops"] = list(more["ops"])
    return written


def measured(network: Network) -> Iterator[dict[str, Any]]:
    """The network's layers, each from a run of the whole network at its batch size."""
    with torch.device("meta"):
        model = network.build().eval()
    modules = dict(model.named_modules())
    for wanted in network.wanted:
        module = modules[wanted.module]
        seen: list[torch.Tensor] = []
        handle = module.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.extend(inputs))
        with torch.device("meta"), torch.no_grad():
            network.forward(model, torch.empty(wanted.batch, *network.size))
        handle.remove()
        size = "x".join(map(str, network.size[1:]))
        size += " latents" if network.library == "diffusers" else ""
        yield entry(
            wanted.name,
            f"{network.title}, {network.library} {network.version.split('+')[0]}, {size}, batch "
            f"{wanted.batch}: {wanted.module}",
            (seen[0].shape, module.weight.shape),
            stride=module.stride,
            padding=module.padding,
            dilation=module.dilation,
            groups=module.groups,
            also=wanted.also,
            ops=wanted.ops,
        )


def published() -> Iterator[dict[str, Any]]:
    for network, layers in PUBLISHED.items():
        for layer in layers:
            yield entry(
                layer.name,
                f"{network}, batch {layer.input_shape[0]}: {layer.module}",
                (layer.input_shape, layer.weight_shape),
                stride=layer.stride,
                padding=layer.padding,
                dilation=1,
                groups=1,
                also=layer.also,
                ops=layer.ops,
            )


def write(path: Path, about: str, layers: Sequence[dict[str, Any]]) -> None:
    """One layer a line, so that a change of one shows as such."""
    lines = ",\n".join(f"    {json.dumps(layer)}" for layer in layers)
    text = f'{{\n  "about": {json.dumps(about)},\n  "layers": [\n{lines}\n  ]\n}}\n'
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(layers)} layers")


def main() -> None:
    layers = [layer for network in NETWORKS for layer in measured(network)]
    layers += published()
    write(FULL, ABOUT, layers)
    by_name = {layer["name"]: layer for layer in layers}
    write(SHORT, ABOUT_SHORT, [by_name[name] for name in SHORT_NAMES])


if __name__ == "__main__":
    main()
