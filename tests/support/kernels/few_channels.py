"""Small convolutions with few input channels, and what is tested of each of their kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe import KernelLaunch
from cudnn_autotune.kernels.family import KernelFamily
from cudnn_autotune.kernels.few_channels.few_channels import FewChannels
from cudnn_autotune.kernels.few_channels.few_channels_planes import FewChannelsPlanes
from cudnn_autotune.kernels.few_channels.few_channels_wgrad import FewChannelsWgrad
from support.conv.fused_cases import NAMES
from support.cuda_emulation.checks import H200
from support.kernels.battery import TINY, Family, offered_settings

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
PLAIN: dict[str, Any] = {"memory_format": torch.contiguous_format}
TF32: dict[str, Any] = {"dtype": FP32, "allow_tf32": True}
ODD_SHAPES: tuple[tuple[Any, ...], ...] = (
    ((1, 3, 2, 2), (8, 3, 5, 5), 1, 4),  # a kernel larger than the image
    ((2, 3, 5, 7), (8, 3, 3, 3), 3, (6, 4)),  # padding larger than the kernel
    ((1, 3, 9, 9), (8, 3, 3, 3), 2, (0, 1, 2, 0)),  # another padding behind
    ((2, 3, 6, 16), (8, 3, 1, 1)),
    ((1, 1, 7, 33), (8, 1, 1, 1)),
    ((1, 2, 9, 21), (40, 2, 2, 5), (3, 1), (1, 0)),
    ((1, 8, 9, 20), (16, 8, 3, 3), 2, 1),
    ((1, 5, 9, 20), (8, 5, 2, 2), (1, 3)),
    ((1, 3, 3, 16), (8, 3, 3, 3), 1, 0),  # one row of pixels
    ((1, 3, 4, 300), (8, 3, 3, 3), 1, 1),  # several tiles in a row
)
"""Arguments of :func:`first_layer`, in any direction."""
EPILOGUES = [
    {"bias": True},
    {"residual": True},
    {"bias": True, "activation": "relu", "dtype": BF16},
    *({"bias": True, "residual": True, "activation": name} for name in NAMES),
]
"""Fields of a problem that say what the convolution is fused with."""
HEIGHT_1: dict[str, tuple[Any, ...]] = {
    "wav2vec2": ((2, 1, 1, 2013), (64, 1, 1, 10), (1, 5)),
    "Conv-TasNet": ((1, 1, 1, 4000), (48, 1, 1, 16), (1, 8)),
    "SEANet": ((1, 1, 1, 1000), (32, 1, 1, 7), 1, (0, 3)),
    "HiFi-GAN's discriminator": ((2, 1, 1, 301), (16, 1, 1, 15), 1, (0, 7)),
    "stereo": ((1, 2, 1, 1201), (24, 2, 1, 7), (3, 2), (0, 3)),
    "log-mel": ((1, 1, 1, 6001), (16, 1, 1, 400), (1, 160), (0, 200)),
    "one tile": ((1, 8, 1, 30), (8, 8, 1, 3), 1, (0, 1, 0, 0)),
}
"""Signals as images of height 1, as :data:`ODD_SHAPES`."""


VOLUMES: dict[str, tuple[Any, ...]] = {
    "causal": ((2, 3, 4, 9, 24), (16, 3, 3, 3, 3), 1, (2, 1, 1, 0, 1, 1)),
    "strided": ((1, 1, 7, 10, 40), (24, 1, 5, 3, 3), (2, 2, 2), (2, 1, 1)),
    "one depth": ((1, 4, 3, 6, 20), (8, 4, 1, 3, 3), (2, 1, 1), (0, 1, 1)),
    "frames": ((2, 8, 3, 5, 17), (8, 8, 2, 1, 2), 1, (1, 0, 0, 0, 0, 1)),
    "one frame": ((1, 2, 1, 1, 60), (16, 2, 1, 1, 5), 1, (0, 0, 2)),
    "padding alone": ((1, 3, 1, 4, 16), (8, 3, 2, 3, 3), 1, (3, 1, 1, 2, 1, 1)),
}
"""First layers of volumes, as :data:`ODD_SHAPES`."""


def first_layer(
    op: str,
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: Any = 1,
    padding: Any = 0,
    **options: Any,
) -> ConvProblem:
    """A problem in float16 and channels_last, unless ``options`` say otherwise."""
    last = torch.channels_last_3d if len(input_shape) == 5 else torch.channels_last
    options = {"dtype": torch.float16, "memory_format": last, **options}
    return ConvProblem(op, input_shape, weight_shape, stride, padding, **options)


NARROW: dict[str, tuple[Any, ...]] = {
    "videos": ((1, 3, 4, 9, 24), (3, 3, 2, 3, 3), 1, (1, 1, 1, 0, 1, 1)),
    "twelve": ((1, 12, 8, 20), (12, 12, 3, 3), 1, 1),
    "sixteen": ((1, 16, 9, 33), (16, 16, 3, 3), 1, (0, 1, 2, 1)),
    "volumes": ((1, 16, 3, 5, 18), (16, 16, 3, 3, 3), 1, 1),
    "long windows": ((1, 1, 5, 7, 70), (10, 1, 3, 3, 10), 1, (1, 1, 4, 1, 1, 5)),
    "odd": ((1, 9, 5, 21), (13, 9, 2, 3), 1, (1, 0, 0, 2)),
    "large windows": ((1, 1, 5, 8, 20), (2, 1, 5, 5, 5), 1, 2),
    "last": ((1, 14, 6, 19), (5, 14, 3, 3), 1, 1),
    "matrix": ((1, 10, 4, 16), (6, 10, 1, 1)),
}
"""Layers of few input channels and few output channels, as :data:`ODD_SHAPES`."""
NARROW_STRIDED: dict[str, tuple[Any, ...]] = {
    "strided": ((1, 12, 9, 40), (7, 12, 3, 3), 2, 1),
    "strided volumes": ((1, 9, 3, 8, 20), (12, 9, 2, 2, 3), (1, 2, 3), (0, 1, 1)),
    "image": ((2, 3, 18, 48), (21, 3, 3, 3), 2, 1),
}


def narrow(op: str, **options: Any) -> list[ConvProblem]:
    """Returns problems of these layers in float16 or bfloat16, then in TF32. The strided layers
    have no dgrad."""
    layers = {**NARROW, **NARROW_STRIDED}
    if op == "dgrad":
        layers = {name: layers[name] for name in NARROW if name != "long windows"}
    halves = [
        first_layer(op, *shapes, **{"dtype": (FP16, BF16)[i % 2], **options})
        for i, shapes in enumerate(layers.values())
    ]
    return [*halves, *(replace(one, dtype=FP32, allow_tf32=True) for one in halves)]


def random_first_layer(
    op: str, choose: random.Random, dtypes: Sequence[torch.dtype], **options: Any
) -> ConvProblem:
    """A small problem in one of the dtypes, with up to 16 input channels."""
    c, dims = choose.choice((*range(1, 9), 12, 16)), choose.choice((2, 3))
    kernel = [choose.randint(1, 5), choose.randint(1, 5)]
    image = [choose.randint(5, 20), choose.randint(5, 50)]
    if dims == 3:
        c, kernel, image = choose.randint(1, 3), [choose.randint(1, 3), *kernel], [3, *image]
    return first_layer(
        op,
        (choose.randint(1, 2), c, *image),
        (choose.choice((8, 16, 24, 48, choose.randint(1, 40))), c, *kernel),
        tuple(choose.randint(1, 3) for _ in range(dims)),
        tuple(choose.randint(0, 4 if dims == 2 else 2) for _ in range(2 * dims)),
        dtype=choose.choice(dtypes),
        **options,
    )


def planes(*shapes: Any, **options: Any) -> ConvProblem:
    """A problem of fprop in contiguous_format."""
    return first_layer("fprop", *shapes, **{**PLAIN, **options})


def _blocks_and_tiles(launch: KernelLaunch) -> tuple[object, object]:
    return launch.grid[0], launch.arguments[-1]


SHAPES = (2, 3, 16, 16), (16, 3, 3, 3)
"""A layer that each of the kernels computes."""
LARGE: tuple[tuple[Any, ...], ...] = (
    ((64, 3, 224, 224), (64, 3, 7, 7), 2, 3),
    ((64, 3, 224, 224), (96, 3, 4, 4), 4),
    ((64, 3, 224, 224), (64, 3, 11, 11), 4, 2),
)
FPROP = {
    "resnet": first_layer("fprop", (1, 3, 40, 72), (64, 3, 7, 7), 2, 3),
    "u-net": first_layer("fprop", (1, 3, 9, 72), (64, 3, 3, 3), 1, 1),
    "mobilenet": first_layer("fprop", (2, 3, 18, 48), (16, 3, 3, 3), 2, 1),
    "efficientnet": first_layer("fprop", (1, 3, 18, 48), (24, 3, 3, 3), 2, 1),
    "convnext": first_layer("fprop", (1, 3, 16, 80), (96, 3, 4, 4), 4),
    "diffusion": first_layer("fprop", (1, 4, 10, 16), (320, 4, 3, 3), 1, 1),
    "grey": first_layer("fprop", (1, 1, 12, 40), (32, 1, 5, 5), 1, 2),
    "two images": first_layer("fprop", (1, 6, 12, 24), (64, 6, 3, 3), 1, 1),
    "inception": first_layer("fprop", (1, 3, 15, 39), (32, 3, 3, 3), 2),
    "alexnet": first_layer("fprop", (1, 3, 23, 40), (64, 3, 11, 11), 4, 2),
}
FEW_CHANNELS = Family(
    kernel=FewChannels(),
    layers=[
        *FPROP.values(),
        *(first_layer("fprop", *VOLUMES[name]) for name in ("causal", "strided", "one depth")),
    ],
    edges=[
        *(first_layer("fprop", *shapes) for shapes in ODD_SHAPES),
        *(first_layer("fprop", *shapes, bias=True, dtype=BF16) for shapes in VOLUMES.values()),
        *(first_layer("fprop", *shapes, bias=True) for shapes in HEIGHT_1.values()),
        *(
            first_layer("fprop", (1, 3, 6, 16), (8, 3, 3, 3), 1, 1, alignment=(alignment, 2, 16))
            for alignment in (2, 4, 8, 16)
        ),
        *narrow("fprop"),
        *narrow("dgrad"),
        *(replace(one, dtype=FP32, allow_tf32=True) for one in FPROP.values()),
        *(first_layer("fprop", *shapes, **TF32) for shapes in VOLUMES.values()),
    ],
    every_offer=[
        *(FPROP[name] for name in ("resnet", "u-net", "mobilenet", "diffusion")),
        *(first_layer("fprop", *shapes, bias=True) for shapes in HEIGHT_1.values()),
    ],
    epilogues=[
        first_layer("fprop", (1, 3, 8, 20), (k, 3, 3, 3), 2, 1, **{**options, **fused})
        for fused in EPILOGUES
        for k, options in ((16, {}), (12, TF32), (3, {}))
    ],
    few_blocks=[
        first_layer("fprop", (3, 3, 21, 70), (32, 3, 3, 3), 1, 1),
        first_layer("fprop", (2, 3, 9, 21, 70), (32, 3, 3, 3, 3), 1, 1),
        first_layer("fprop", (2, 3, 9, 21, 70), (13, 3, 3, 3, 3), 1, 1, **TF32),
        first_layer("dgrad", (2, 9, 21, 70), (12, 9, 3, 3), 1, 1),
    ],
    blocks_and_tiles=_blocks_and_tiles,
    spoilt=[
        *(FPROP[name] for name in ("resnet", "u-net", "inception", "grey", "diffusion")),
        first_layer("fprop", *VOLUMES["causal"]),
        *(one for op in ("fprop", "dgrad") for one in narrow(op)[::2]),
    ],
    patterns=[first_layer("fprop", (2, 3, 23, 25), (16, 3, 7, 7), 2)],
    not_computed=[
        first_layer("fprop", *SHAPES, dtype=FP32, allow_tf32=False),
        first_layer("fprop", *SHAPES, **PLAIN),
        first_layer("fprop", *SHAPES, dilation=2),
        first_layer("fprop", *SHAPES, alignment=(32, 32, 8)),
        first_layer("fprop", (2, 17, 16, 16), (16, 17, 3, 3)),
        first_layer("fprop", (2, 3, 64, 64), (64, 3, 14, 14), 14, **TF32),
        first_layer("dgrad", (2, 3, 16, 16), (17, 3, 3, 3)),
        first_layer("dgrad", *SHAPES, 2),
        first_layer("dgrad", *SHAPES, 1, 3),
        first_layer("fprop", (2, 6, 16, 16), (16, 3, 3, 3), groups=2),
        first_layer("fprop", (2, 3, 64, 64), (64, 3, 16, 16), 16),
        first_layer("fprop", (1, 1, 1, 1), (65544, 1, 1, 1)),
        first_layer("fprop", (1, 2, 1, 1), (8, 2, 1, 1), 2**30, (0, 2**29)),
        first_layer("fprop", (1, 2, 1, 1), (8, 2, 1, 1), 2**30, (2**29, 0)),
        first_layer("fprop", (1, 2, 1, 1, 1), (8, 2, 1, 1, 1), 2**30, (2**29, 0, 0)),
        first_layer("fprop", (2, 3, 16), (16, 3, 3), **PLAIN),
        first_layer("wgrad", *SHAPES),
    ],
    large=[first_layer("fprop", *shapes) for shapes in (*LARGE, ((1, 3, 224, 224), *LARGE[0][1:]))],
    compiled=[
        first_layer("fprop", (1, 3, 40, 72), (64, 3, 7, 7), 2, 3),
        first_layer("fprop", (1, 3, 9, 72), (64, 3, 3, 3), 1, 1),
        first_layer("fprop", (1, 3, 15, 39), (32, 3, 3, 3), 2),
        *(one for op in ("fprop", "dgrad") for one in narrow(op)[::4]),
    ],
    draw=lambda choose: random_first_layer(
        choose.choice(("fprop", "dgrad")), choose, (FP16, BF16, FP32)
    ),
    draws=12,
)

SIGNALS = {
    "resnet": planes((1, 3, 20, 72), (64, 3, 7, 7), 2, 3),
    "u-net": planes((1, 3, 9, 72), (64, 3, 3, 3), 1, 1),
    "convnext": planes((1, 3, 16, 80), (96, 3, 4, 4), 4),
    "diffusion": planes((2, 4, 10, 16), (72, 4, 3, 3), 1, 1),
    "inception": planes((1, 3, 15, 39), (32, 3, 3, 3), 2),
    "wav2vec2": planes((2, 1, 2013), (64, 1, 10), 5),
    "Conv-TasNet": planes((1, 1, 4000), (48, 1, 16), 8),
    "SEANet": planes((1, 1, 1000), (32, 1, 7), 1, 3),
    "stereo": planes((2, 2, 601), (20, 2, 7), 2, 3),
    "spectrum": planes((1, 1, 6001), (34, 1, 400), 160, 200),
    "HiFi-GAN's last": planes((2, 32, 331), (1, 32, 7), 1, 3, bias=True, activation="tanh"),
    "last of images": planes((1, 12, 9, 40), (3, 12, 3, 3), 1, 1),
    "videos": planes((2, 3, 5, 9, 40), (3, 3, 2, 3, 3), 1, (1, 1, 1, 0, 1, 1)),
    "long windows": planes((1, 1, 5, 7, 70), (10, 1, 3, 3, 10), 1, (1, 1, 4, 1, 1, 5)),
    "last of volumes": planes((1, 16, 3, 4, 24), (4, 16, 1, 3, 3), 1, (0, 1, 1)),
    "first of volumes": planes((1, 1, 7, 10, 40), (16, 1, 5, 5, 5), 2, 2, bias=True),
    "whole videos": planes((2, 3, 4, 17, 70), (3, 3, 2, 3, 3)),
    "whole volumes": planes((1, 1, 5, 18, 50), (10, 1, 3, 3, 10), dtype=BF16),
    "odd pad": planes((1, 2, 3, 9, 61), (5, 2, 2, 3, 4), (1, 1, 3), (0, 1, 3), bias=True),
}
DGRAD: dict[str, tuple[Any, ...]] = {
    "HiFi-GAN's last": ((2, 32, 331), (1, 32, 7), 1, 3),
    "SEANet": ((1, 1, 1000), (32, 1, 7), 1, (2, 5)),
    "even": ((2, 3, 130), (24, 3, 4), 1, (0, 3)),
    "u-net": ((1, 3, 9, 72), (16, 3, 3, 3), 1, (1, 0)),
    "last of images": ((1, 12, 9, 40), (3, 12, 2, 3), 1, (1, 2, 0, 1)),
    "videos": ((2, 3, 5, 9, 40), (3, 3, 2, 3, 3), 1, (1, 1, 1, 0, 1, 2)),
    "whole videos": ((1, 3, 4, 17, 70), (3, 3, 2, 3, 3)),
    "long windows": ((1, 1, 5, 7, 70), (4, 1, 3, 3, 10), 1, (1, 1, 4, 1, 1, 5)),
}

NARROW_PLANES = [
    replace(planes(*shapes, dtype=dtype), op=op)
    for name, shapes in NARROW.items()
    for dtype in (FP16, BF16, FP32)
    for op in ("fprop", "dgrad")
    if name != "volumes" and (name, op) != ("long windows", "dgrad")
]
SPECTRUM = planes((32, 1, 160_000), (402, 1, 400), 160, 200)
"""A layer with windows that are too long for TF32."""
LARGE_PLANES = [
    planes((8, 1, 160_000), (512, 1, 10), 5),  # wav2vec2
    planes((8, 1, 64_000), (256, 1, 16), 8, bias=True, activation="relu"),  # Conv-TasNet
    planes((8, 1, 240_000), (32, 1, 7), 1, 3, dtype=BF16),  # SEANet
    SPECTRUM,
    planes((64, 3, 224, 224), (64, 3, 7, 7), 2, 3),  # ResNet
    planes((8, 32, 65_536), (1, 32, 7), 1, 3, bias=True, activation="tanh"),  # HiFi-GAN's last
    planes((8, 1, 524_200), (512, 1, 3), 1, 1),  # nearly 2^31 outputs
    planes((16, 3, 40, 320, 320), (3, 3, 2, 3, 3), 1, (1, 1, 1, 0, 1, 1)),  # videos
    planes((25, 1, 100, 375, 128), (10, 1, 3, 3, 10), 1, (1, 1, 4, 1, 1, 5)),  # long windows
]
PLANES = Family(
    kernel=FewChannelsPlanes(),
    most=4,
    offers=range(1, 5),
    layers=[
        *SIGNALS.values(),
        *(replace(SIGNALS[name], dtype=FP32) for name in SIGNALS if name != "spectrum"),
        *(
            replace(planes(*shapes, dtype=dtype), op="dgrad")
            for name, shapes in DGRAD.items()
            for dtype in (FP16, BF16, FP32)
            if (name, dtype) != ("long windows", FP32)
        ),
    ],
    edges=[
        *NARROW_PLANES,
        *(planes(*shapes) for shapes in HEIGHT_1.values()),
        *(planes(*shapes, bias=True, dtype=BF16) for shapes in VOLUMES.values()),
        planes((2, 3, 160), (7, 3, 3)),
        # Rows of the output begin anywhere.
        *(planes((2, 1, length), (9, 1, 3)) for length in range(130, 138)),
        *(planes((2, 1, length), (9, 1, 3), dtype=FP32) for length in range(130, 134)),
        *(
            planes((2, 2, 3, length), (16, 2, 1, 2), 1, 1, residual=True, bias=True)
            for length in range(130, 138)
        ),
        *(planes((1, 2, 160), (8, 2, 3), 1, 1, alignment=(a, 2, 16)) for a in (2, 4, 8, 16)),
    ],
    epilogues=[
        planes((1, 1, 143), (24, 1, 7), 2, 1, **{"dtype": dtype, **fused})
        for fused in EPILOGUES
        for dtype in (FP16, FP32)
    ],
    few_blocks=[
        planes((3, 1, 2900), (16, 1, 9), 2),
        planes((3, 3, 21, 70), (32, 3, 3, 3), 1, 1),
        planes((2, 3, 9, 21, 70), (12, 3, 3, 3, 3), 1, 1, residual=True),
    ],
    blocks_and_tiles=_blocks_and_tiles,
    spoilt=[
        *(SIGNALS[name] for name in ("resnet", "inception", "wav2vec2", "SEANet", "videos")),
        *(SIGNALS[name] for name in ("whole videos", "whole volumes", "odd pad")),
        replace(planes(*DGRAD["whole videos"]), op="dgrad"),
        *(replace(SIGNALS[name], dtype=FP32) for name in ("wav2vec2", "videos")),
    ],
    patterns=[planes((1, 3, 15, 39), (32, 3, 3, 3), 2)],
    not_computed=[
        planes((2, 3, 160), (16, 3, 3), dtype=FP32, allow_tf32=False),
        first_layer("fprop", (2, 3, 16, 40), (16, 3, 3, 3)),
        first_layer("fprop", *VOLUMES["causal"]),
        planes((2, 3, 160), (16, 3, 3), dilation=2),
        planes((2, 3, 160), (16, 3, 3), alignment=(32, 32, 8)),
        planes((2, 17, 160), (16, 17, 3)),
        planes((2, 64, 20, 20), (3, 64, 3, 3)),
        planes((2, 6, 160), (16, 3, 3), groups=2),
        planes((2, 3, 17), (16, 3, 3)),
        planes((2, 1, 9000), (16, 1, 600), 8),
        replace(SPECTRUM, dtype=FP32),
        planes((1, 2, 64), (8, 2, 1), 2**24, 2**29),
        first_layer("wgrad", (2, 3, 160), (16, 3, 3), **PLAIN),
        first_layer("dgrad", (2, 3, 160), (16, 3, 3), 2, **PLAIN),
        first_layer("dgrad", (2, 3, 160), (16, 3, 3), 1, 3, **PLAIN),
    ],
    large=LARGE_PLANES,
    compiled=[
        *LARGE_PLANES,
        *(replace(one, dtype=FP32) for one in LARGE_PLANES if one != SPECTRUM),
    ],
    draw=lambda choose: random_first_layer("fprop", choose, (FP16, BF16, FP32), **PLAIN),
    draws=8,
)

WGRAD_LAYERS: dict[str, tuple[Any, ...]] = {
    "resnet": ((2, 3, 24, 48), (64, 3, 7, 7), 2, 3),
    "mobilenet": ((2, 3, 18, 48), (16, 3, 3, 3), 2, 1),
    "efficientnet": ((1, 3, 18, 40), (24, 3, 3, 3), 2, 1),  # 20 columns, 9 rows
    "convnext": ((1, 3, 16, 80), (96, 3, 4, 4), 4),
    "diffusion": ((1, 4, 10, 16), (320, 4, 3, 3), 1, 1),
    "inception": ((1, 3, 15, 39), (32, 3, 3, 3), 2),
}
WGRAD_PLANES = [
    first_layer("wgrad", *shapes, dtype=(FP16, FP32, BF16)[i % 3], **PLAIN)
    for i, shapes in enumerate(
        (
            *WGRAD_LAYERS.values(),
            *((p.input_shape, p.weight_shape, p.stride, p.padding) for p in SIGNALS.values()),
        )
    )
    if shapes[0][1] <= 16
]
"""First layers in contiguous_format, with rows that are even, odd, or whole vectors."""


def _narrow_settings(kernel: KernelFamily, problem: ConvProblem, gpu: Gpu) -> list[str]:
    return [s for s in offered_settings(kernel, problem, gpu) if s.startswith("DEPTHS=")]


def _other_settings(kernel: KernelFamily, problem: ConvProblem, gpu: Gpu) -> list[str]:
    return [s for s in offered_settings(kernel, problem, gpu) if not s.startswith("DEPTHS=")]


WGRAD = Family(
    kernel=FewChannelsWgrad(),
    settings=_other_settings,
    gpus=(H200, TINY),
    most=1,
    has_conflicts=False,
    layers=[
        *(first_layer("wgrad", *shapes) for shapes in WGRAD_LAYERS.values()),
        *(first_layer("wgrad", *shapes, **TF32) for shapes in WGRAD_LAYERS.values()),
        first_layer("wgrad", *WGRAD_LAYERS["convnext"], dtype=BF16),
        first_layer("wgrad", (1, 3, 9, 40), (64, 3, 3, 3), 1, 1, dtype=BF16),  # u-net
        first_layer("wgrad", (1, 1, 12, 40), (32, 1, 5, 5), 1, 2),  # grey
        first_layer("wgrad", (1, 6, 12, 24), (40, 6, 3, 3), 1, 1),  # two images
        first_layer("wgrad", (1, 3, 23, 40), (64, 3, 11, 11), 4, 2),  # alexnet
        first_layer("wgrad", *VOLUMES["causal"]),
        first_layer("wgrad", *VOLUMES["strided"], **TF32),
    ],
    edges=[
        *(first_layer("wgrad", *s, dtype=d) for s in VOLUMES.values() for d in (BF16, FP32)),
        *(first_layer("wgrad", *shapes) for shapes in ODD_SHAPES),
        *(first_layer("wgrad", *s, dtype=d) for s in HEIGHT_1.values() for d in (BF16, FP32)),
        *narrow("wgrad"),
        *WGRAD_PLANES,
        *(first_layer("wgrad", *shapes, **PLAIN) for shapes in ODD_SHAPES),
        *(first_layer("wgrad", *shapes, dtype=FP32, **PLAIN) for shapes in VOLUMES.values()),
        *(first_layer("wgrad", *s, **PLAIN) for s in HEIGHT_1.values()),
        *narrow("wgrad", **PLAIN)[::2],
        # Rows of the output begin anywhere.
        *(first_layer("wgrad", (2, 1, n), (9, 1, 3), 2, 1, **PLAIN) for n in range(270, 285, 2)),
        *(first_layer("wgrad", (3, 2, 5, n), (21, 2, 3, 2), **PLAIN) for n in range(34, 42)),
        *(
            first_layer("wgrad", (2, 2, 5, 37), (5, 2, 2, 3), alignment=(a, 4, 16), **PLAIN)
            for a in (2, 4, 8, 16)
        ),
        *(
            first_layer(
                "wgrad", (1, 3, 6, 16), (8, 3, 3, 3), 1, 1, alignment=(a, least, 16), **tf32
            )
            for least, tf32 in ((2, {}), (4, TF32))
            for a in (2, 4, 8, 16)
            if a >= least
        ),
    ],
    every_offer=[
        *(
            first_layer("wgrad", *WGRAD_LAYERS[name])
            for name in ("resnet", "mobilenet", "diffusion")
        ),
        first_layer("wgrad", *WGRAD_LAYERS["resnet"], **TF32),
    ],
    few_blocks=[
        first_layer("wgrad", *WGRAD_LAYERS["resnet"]),
        first_layer("wgrad", *WGRAD_LAYERS["efficientnet"]),
        first_layer("wgrad", *WGRAD_LAYERS["resnet"], **TF32),
        *(first_layer("wgrad", *WGRAD_LAYERS["resnet"], **PLAIN, dtype=d) for d in (FP16, FP32)),
        first_layer("wgrad", *HEIGHT_1["wav2vec2"], **PLAIN),
    ],
    blocks_and_tiles=_blocks_and_tiles,
    spoilt=[
        *(first_layer("wgrad", *WGRAD_LAYERS[n]) for n in ("resnet", "efficientnet", "inception")),
        first_layer("wgrad", *WGRAD_LAYERS["inception"], **TF32),
        *(first_layer("wgrad", *HEIGHT_1[name]) for name in ("wav2vec2", "stereo")),
        first_layer("wgrad", *VOLUMES["causal"]),
        first_layer("wgrad", *VOLUMES["strided"], **TF32),
        # All gradients of few weights depend on what is spoilt.
        *(p for p in (*narrow("wgrad")[::2], *WGRAD_PLANES[::3]) if p.input_shape[1] > 1),
        *(first_layer("wgrad", *HEIGHT_1[n], **PLAIN) for n in ("wav2vec2", "stereo")),
    ],
    patterns=[first_layer("wgrad", (2, 3, 23, 25), (16, 3, 7, 7), 2)],
    not_computed=[
        first_layer("wgrad", *SHAPES, dtype=FP32, allow_tf32=False),
        first_layer("wgrad", *SHAPES, dilation=2, **PLAIN),
        first_layer("wgrad", (2, 17, 16, 16), (16, 17, 3, 3)),
        first_layer("wgrad", *SHAPES, alignment=(32, 32, 8)),
        first_layer("wgrad", (2, 3, 64, 64), (64, 3, 16, 16), 16),
        first_layer("fprop", *SHAPES),
    ],
    large=[
        first_layer("wgrad", *shapes, **options)
        for shapes in (*LARGE, ((8, 4, 64, 64), (320, 4, 3, 3), 1, 1))
        for options in ({}, TF32)
    ],
    compiled=[
        first_layer("wgrad", (2, 3, 24, 48), (64, 3, 7, 7), 2, 3),
        first_layer("wgrad", (1, 3, 9, 40), (64, 3, 3, 3), 1, 1, dtype=BF16),
        first_layer("wgrad", (1, 3, 15, 39), (32, 3, 3, 3), 2),
        first_layer("wgrad", (1, 3, 15, 39), (32, 3, 3, 3), 2, **TF32),
        *narrow("wgrad")[::6],
        *WGRAD_PLANES[::6],
    ],
    draw=lambda choose: random_first_layer(
        "wgrad", choose, (FP16, BF16, FP32), **choose.choice(({}, PLAIN))
    ),
    draws=16,
)

NARROW_WGRAD_LAYERS: dict[str, tuple[Any, ...]] = {
    **{name: layer for name, layer in NARROW.items() if name not in ("volumes", "matrix")},
    "whole videos": ((2, 3, 4, 17, 70), (3, 3, 2, 3, 3)),
    "whole volumes": ((1, 1, 5, 18, 50), (10, 1, 3, 3, 10)),
    "SegResNet": ((2, 8, 9, 10, 32), (8, 8, 3, 3, 3), 1, 1),
    "many depths": ((1, 2, 21, 5, 24), (3, 2, 3, 3, 3), 1, (1, 0, 1)),
    "strided depths": ((1, 3, 9, 8, 40), (4, 3, 3, 2, 3), (2, 1, 1), (1, 0, 2)),
    "one depth": ((1, 4, 3, 6, 20), (8, 4, 1, 3, 3), 1, (0, 1, 1)),
    "one row": ((2, 6, 1, 90), (7, 6, 1, 4), 1, (0, 0, 0, 3)),
    "a kernel larger than the image": ((1, 3, 2, 2), (4, 3, 5, 5), 1, 4),
    "a column": ((1, 16, 20, 17), (4, 16, 5, 1), 1, (2, 0)),
    "frames": ((2, 8, 3, 5, 17), (8, 8, 2, 1, 2), 1, (1, 0, 0, 0, 0, 1)),
    "several tiles in a row": ((1, 3, 7, 700), (3, 3, 3, 3), 1, 1),
    "many rows": ((1, 5, 41, 20), (6, 5, 3, 5), 1, (1, 0)),
}
"""Layers of stride 1 in rows and columns, as :data:`ODD_SHAPES`."""
NARROW_WGRAD_CONTIGUOUS = [
    *(first_layer("wgrad", (2, 4, n), (3, 4, 7), 1, 3, **PLAIN) for n in range(130, 138)),
    *(first_layer("wgrad", (3, 3, 7, n), (3, 3, 3, 3), **PLAIN) for n in range(34, 42)),
    *(first_layer("wgrad", (2, 5, 6, n), (4, 5, 2, 4), 1, (0, 3), **PLAIN) for n in (31, 48)),
    *(
        first_layer("wgrad", (2, 3, 5, 36), (5, 3, 2, 3), alignment=(a, 4, 16), **PLAIN)
        for a in (2, 4, 8, 16)
    ),
    first_layer("wgrad", (2, 32, 331), (1, 32, 7), 1, 3, **PLAIN),  # HiFi-GAN's last
    first_layer("wgrad", (1, 64, 9, 40), (3, 64, 3, 3), 1, 1, **PLAIN),  # of a super-resolution
    *(first_layer("wgrad", (2, 4, n), (3, 4, 6), 1, 2, **PLAIN, **TF32) for n in range(130, 134)),
    *(first_layer("wgrad", (3, 3, 7, n), (3, 3, 3, 3), **PLAIN, **TF32) for n in range(34, 38)),
    *(
        first_layer("wgrad", (2, 3, 5, 36), (5, 3, 2, 3), alignment=(a, 4, 16), **PLAIN, **TF32)
        for a in (4, 8, 16)
    ),
]
NARROW_WGRAD_PROBLEMS = [
    first_layer("wgrad", *shapes, dtype=dtype, **options)
    for i, shapes in enumerate(NARROW_WGRAD_LAYERS.values())
    for options in ({}, PLAIN)
    for dtype in ((FP16, FP32) if bool(options) == i % 2 else (BF16,))
]
NARROW_WGRAD_LARGE = [
    first_layer("wgrad", *shapes, **options)
    for shapes in (
        ((16, 3, 40, 320, 320), (3, 3, 2, 3, 3)),
        ((2, 8, 128, 128, 128), (8, 8, 3, 3, 3), 1, 1),
        ((8, 12, 512, 512), (12, 12, 3, 3), 1, 1),
        ((25, 1, 100, 375, 128), (10, 1, 3, 3, 10)),
    )
    for options in ({}, PLAIN, TF32, {**PLAIN, **TF32})
]
NARROW_WGRAD = Family(
    kernel=FewChannelsWgrad(),
    settings=_narrow_settings,
    gpus=(H200, TINY),
    layers=NARROW_WGRAD_PROBLEMS,
    edges=[
        *NARROW_WGRAD_CONTIGUOUS,
        *(
            first_layer(
                "wgrad", (1, 3, 6, 16), (8, 3, 3, 3), 1, 1, alignment=(a, least, 16), **tf32
            )
            for least, tf32 in ((2, {}), (4, TF32))
            for a in (2, 4, 8, 16)
            if a >= least
        ),
    ],
    every_offer=[
        first_layer("wgrad", *NARROW_WGRAD_LAYERS[name], **options)
        for name in ("SegResNet", "whole videos", "several tiles in a row")
        for options in ({}, PLAIN, TF32)
    ],
    few_blocks=[
        first_layer("wgrad", *shapes, **options)
        for shapes in (
            ((3, 3, 21, 270), (3, 3, 3, 3), 1, 1),
            ((9, 3, 7, 21, 70), (4, 3, 3, 3, 3), 1, 1),
            ((2, 3, 9, 21, 70), (4, 3, 3, 3, 3), (2, 1, 1), 1),
        )
        for options in ({}, PLAIN, TF32)
    ],
    blocks_and_tiles=_blocks_and_tiles,
    spoilt=[
        *(p for p in NARROW_WGRAD_PROBLEMS if p.input_shape[1] > 1),
        *NARROW_WGRAD_CONTIGUOUS[::3],
    ],
    patterns=[first_layer("wgrad", (1, 3, 9, 100), (5, 3, 3, 3))],
    not_computed=[
        first_layer("wgrad", (2, 3, 16, 16), (3, 3, 3, 3), 2),
        first_layer("wgrad", (2, 3, 16, 16), (3, 3, 3, 3), (1, 2)),
        first_layer("wgrad", (2, 3, 16, 16), (3, 3, 3, 3), dilation=2, **PLAIN),
        first_layer("wgrad", (2, 3, 16, 16), (64, 3, 3, 3)),
        first_layer("wgrad", (2, 3, 16, 16), (3, 3, 3, 3), dtype=FP32, allow_tf32=False),
        first_layer("wgrad", (2, 17, 16, 16), (3, 17, 3, 3)),
        first_layer("wgrad", (2, 16, 3, 16, 16), (16, 16, 3, 3, 3)),  # too many sums
    ],
    large=NARROW_WGRAD_LARGE,
    compiled=NARROW_WGRAD_LARGE,
    draw=lambda choose: replace(
        random_first_layer("wgrad", choose, (FP16, BF16, FP32), **choose.choice(({}, PLAIN))),
        stride=1,
    ),
    draws=16,
)
"""The tilings for few filters."""
