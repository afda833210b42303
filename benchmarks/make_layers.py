#!/usr/bin/env python
"""Reads the shapes of the layer lists off the networks that they name, and writes the lists anew.

layers.json is the list; a layer's `source` names its network, library, input size, batch and
module. torchvision's and diffusers' models run on the meta device, where nothing is computed and no
weights are loaded, and a hook notes what the module was given. To add a layer, write its `name` and
`source` (and `also` and `ops`), and run this script. Layers of networks that are in neither library
stay as they are: their shapes were worked out from the definitions that `source` names. The short
list that the package ships gets its layers from the long one.

Needs `torchvision` and `diffusers`; each layer's `source` has the version that was used.

    python benchmarks/make_layers.py
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FULL = HERE / "layers.json"
SHORT = HERE.parent / "cudnn_autotune" / "audit" / "layers_default.json"

# A network's title in `source` -> the function of its library that builds it, and its arguments.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50": ("models.resnet50", {}),
    "VGG-16": ("models.vgg16", {}),
    "ResNeXt-50 32x4d": ("models.resnext50_32x4d", {}),
    "Inception v3": ("models.inception_v3", {"init_weights": False}),
    "EfficientNetV2-S": ("models.efficientnet_v2_s", {}),
    "ConvNeXt-T": ("models.convnext_tiny", {}),
    "ConvNeXt-B": ("models.convnext_base", {}),
    "MobileNetV3-Large": ("models.mobilenet_v3_large", {}),
    "DeepLabV3 ResNet-50": ("models.segmentation.deeplabv3_resnet50", {"weights_backbone": None}),
    "R(2+1)D-18": ("models.video.r2plus1d_18", {}),
    "R3D-18": ("models.video.r3d_18", {}),
    # By their config.json; what is not named is diffusers' default.
    "Stable Diffusion 1.5 UNet": (
        "UNet2DConditionModel",
        {"sample_size": 64, "cross_attention_dim": 768},
    ),
    "Stable Diffusion 1.5 VAE decoder": (
        "AutoencoderKL",
        {
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "block_out_channels": [128, 256, 512, 512],
            "layers_per_block": 2,
            "sample_size": 512,
        },
    ),
}
DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
SOURCE = re.compile(
    r"(?P<title>.+), (?P<library>torchvision|diffusers) \S+, (?P<size>[\dx]+)(?P<latents> latents)?"
    r", batch (?P<batch>\d+): (?P<module>\S+)"
)


def forward(model: Any, title: str, batch: int, size: list[int], is_latent: bool) -> None:
    """Runs the whole network on the meta device, on images or on latents."""
    import torch

    x = torch.empty(batch, 4 if is_latent else 3, *size)
    if title.endswith("UNet"):
        model(x, torch.empty(batch), torch.empty(batch, 77, 768))
    elif title.endswith("decoder"):
        model.decode(x)
    else:
        model(x)


def measured(layer: dict[str, Any]) -> dict[str, Any]:
    """The layer with its shapes read off its network; as it is where no library has the network."""
    import torch

    found = SOURCE.fullmatch(layer["source"])
    if found is None:
        return layer
    library = importlib.import_module(found["library"])
    name, arguments = NETWORKS[found["title"]]
    build: Any = library
    for part in name.split("."):
        build = getattr(build, part)
    seen: list[Any] = []
    with torch.device("meta"), torch.no_grad():
        model = build(**arguments).eval()
        module = model.get_submodule(found["module"])
        module.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
        size = [int(side) for side in found["size"].split("x")]
        forward(model, found["title"], int(found["batch"]), size, bool(found["latents"]))
    version = library.__version__.split("+")[0]
    head, _, tail = layer["source"].partition(f", {found['library']} ")
    written = {
        "name": layer["name"],
        "source": f"{head}, {found['library']} {version},{tail.partition(',')[2]}",
        "input_shape": list(seen[0].shape),
        "weight_shape": list(module.weight.shape),
    }
    for field, default in DEFAULTS.items():
        value = getattr(module, field)
        if isinstance(value, tuple):
            value = value[0] if len(set(value)) == 1 else list(value)
        if value != default:
            written[field] = value
    return written | {key: layer[key] for key in ("also", "ops") if key in layer}


def write(path: Path, about: str, layers: list[dict[str, Any]]) -> None:
    """One layer a line, so that a change of one shows as such."""
    lines = ",\n".join(f"    {json.dumps(layer)}" for layer in layers)
    text = f'{{\n  "about": {json.dumps(about)},\n  "layers": [\n{lines}\n  ]\n}}\n'
    path.write_text(text, encoding="utf-8")
    print(f"{path.name}: {len(layers)} layers")


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    full, short = (json.loads(path.read_text(encoding="utf-8")) for path in (FULL, SHORT))
    try:
        layers = [measured(layer) for layer in full["layers"]]
    except ModuleNotFoundError as error:
        sys.exit(f"needs torchvision and diffusers: {error}")
    by_name = {layer["name"]: layer for layer in layers}
    write(FULL, full["about"], layers)
    write(SHORT, short["about"], [by_name[layer["name"]] for layer in short["layers"]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
