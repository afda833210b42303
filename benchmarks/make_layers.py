#!/usr/bin/env python
"""Writes the layer lists: layers.json beside this script, and the short one that the package ships.

The shapes are read off the real networks: torchvision's and diffusers' models run on the meta
device, where nothing is computed and no weights are loaded, and a hook notes what each wanted
convolution was given. YOLOv8 and the 3-D U-Net are in neither library: `layer_lists/published.py`
has their layers, worked out from the definitions that it names.

Needs `torchvision` and `diffusers`; each layer's `source` has the version that was used. The same
versions write the same files.

    python benchmarks/make_layers.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FULL = HERE / "layers.json"
SHORT = HERE.parent / "cudnn_autotune" / "audit" / "layers_default.json"

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


def made() -> list[dict[str, Any]]:
    """The layers of all networks, in the list's order."""
    from layer_lists import classification, diffusion, segmentation, video
    from layer_lists.network import measured
    from layer_lists.published import published

    families = (classification, diffusion, segmentation, video)
    networks = [network for family in families for network in family.NETWORKS]
    return [*(layer for network in networks for layer in measured(network)), *published()]


def write(path: Path, about: str, layers: Sequence[dict[str, Any]]) -> None:
    """One layer a line, so that a change of one shows as such."""
    lines = ",\n".join(f"    {json.dumps(layer)}" for layer in layers)
    text = f'{{\n  "about": {json.dumps(about)},\n  "layers": [\n{lines}\n  ]\n}}\n'
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(layers)} layers")


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        layers = made()
    except ModuleNotFoundError as error:
        sys.exit(f"needs torchvision and diffusers: {error}")
    write(FULL, ABOUT, layers)
    by_name = {layer["name"]: layer for layer in layers}
    write(SHORT, ABOUT_SHORT, [by_name[name] for name in SHORT_NAMES])
    return 0


if __name__ == "__main__":
    sys.exit(main())
