"""Layers worked out from published definitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from layer_lists.network import FIRST, entry


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
