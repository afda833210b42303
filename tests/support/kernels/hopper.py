"""Convolutions for the matrix instruction of a warpgroup, and what is tested of each kernel."""

from __future__ import annotations

import random
from typing import Any

import torch

from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.kernels.hopper.few_filters import FewFilters
from cudnn_autotune.kernels.hopper.implicit_gemm_1d import ImplicitGemm1d
from cudnn_autotune.kernels.hopper.implicit_gemm_1d_wgrad import ImplicitGemm1dWgrad
from support.cuda_emulation.checks import H200
from support.kernels.battery import TINY, Family

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
PLAIN: dict[str, Any] = {"memory_format": torch.contiguous_format}
FUSED = [
    {"activation": activation, **dict.fromkeys(added, True)}
    for added in (("bias",), ("residual",), ("bias", "residual"))
    for activation in ("", "relu", "leaky_relu(0.1)", "silu", "prelu")
]
"""Fields of a problem that say what the convolution is fused with."""
ALIGNMENTS: list[dict[str, Any]] = [
    {"alignment": (8, 32, 32)},
    {"alignment": (32, 8, 32)},
    {"alignment": (32, 32, 8)},
]


def filters(
    op: str,
    x: tuple[int, ...],
    channels: tuple[int, int],
    kernel: int | tuple[int, ...] = 3,
    padding: Any = 1,
    dilation: Any = 1,
    **options: Any,
) -> ConvProblem:
    """A problem whose ``channels`` are those that the kernel reads, and those that it writes.

    Args:
        x: images, and the depth (in 3-d), height and width of the input.
    """
    dims = len(x) - 1
    c, k = channels if op == "fprop" else reversed(channels)
    kernels = (kernel,) * dims if isinstance(kernel, int) else kernel
    groups = options.get("groups", 1)
    options = {"stride": 1, "dtype": FP16, "memory_format": CHANNELS_LAST[dims], **options}
    return ConvProblem(
        *(op, (x[0], c, *x[1:]), (k, c // groups, *kernels)),
        padding=padding,
        dilation=dilation,
        **options,
    )


def signal(
    op: str,
    x: tuple[int, int],
    groups: int,
    width: int | tuple[int, int],
    kernel: int,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int = 1,
    height: int = 1,
    **options: Any,
) -> ConvProblem:
    """A problem with an input of (images, length) and ``width`` channels a group, in and out."""
    c, k = (width, width) if isinstance(width, int) else width
    before, after = (padding, padding) if isinstance(padding, int) else padding
    options = {"dtype": FP16, "memory_format": torch.channels_last, **options}
    return ConvProblem(
        op,
        (x[0], groups * c, height, x[1]),
        (groups * k, c, 1, kernel),
        (1, stride),
        (0, before, 0, after),
        (1, dilation),
        groups,
        **options,
    )


def _draw_filters(choose: random.Random) -> ConvProblem:
    kernel: tuple[int, ...] = (choose.choice((2, 3, 3, 4, 6)), choose.choice((2, 3, 3, 5, 7)))
    dilation: tuple[int, ...] = (choose.choice((1, 1, 2)), 1)
    size: tuple[int, ...] = (choose.randint(1, 30), choose.randint(1, 90))
    if choose.random() < 0.4:
        kernel = (choose.choice((1, 2, 3, 5)), *kernel)
        dilation = (choose.choice((1, 2)), *dilation)
        size = (choose.randint(1, 7), size[0] // 2 + 1, size[1] // 2 + 1)
    return filters(
        choose.choice(("fprop", "dgrad")),
        (choose.randint(1, 3), *size),
        (16 * choose.randint(1, 7), 8 * choose.choice((1, 2, 3, 4, 5, 9, 12, 15))),
        kernel,
        tuple(choose.randint(0, k) for k in (*kernel, *kernel)),
        dilation,
        dtype=choose.choice((FP16, BF16)),
    )


def _draw_signal(choose: random.Random, ops: tuple[str, ...]) -> ConvProblem:
    op = choose.choice(ops)
    stride = choose.choice((1, 2, 3, 8)) if op == "dgrad" else 1
    kernel = choose.choice((2, 3, 5, 8, 16, 19, 40))
    dilation = choose.choice((1, 1, 2, 7)) if stride == 1 else 1
    return signal(
        op,
        (choose.randint(1, 3), choose.randint(dilation * kernel, 600)),
        choose.choice((1, 2, 3)),
        (8 * choose.randint(1, 9), 8 * choose.randint(1, 9)),
        kernel,
        stride,
        (choose.randint(0, kernel), choose.randint(0, kernel)),
        dilation,
    )


LAYERS: dict[str, tuple[Any, ...]] = {
    "DenseNet's, 14 x 14": ((1, 14, 14), (128, 32)),
    "DenseNet's, 7 x 7, whose rows share their padding": ((3, 7, 7), (128, 32)),
    "rows of several tiles": ((1, 9, 75), (32, 32)),
    "a row as wide as the window": ((1, 5, 62), (16, 16)),
    "ESRGAN's": ((1, 11, 23), (96, 32)),
    "a stage of ten planes": ((1, 8, 9), (160, 16)),
    "8 filters": ((2, 10, 33), (64, 8)),
    "24 filters": ((2, 10, 17), (48, 24)),
    "64 filters": ((1, 9, 20), (32, 64)),
    "filters of 5 x 5": ((1, 13, 19), (32, 16), 5, 2),
    "filters of 9 columns": ((1, 6, 30), (16, 8), (2, 9), (1, 4)),
    "filters of 2 x 4": ((1, 7, 21), (16, 8), (2, 4), 1),
    "no padding": ((2, 12, 12), (32, 16), 3, 0),
    "padding larger than the kernel": ((1, 6, 6), (16, 8), 3, 4),
    "other padding after than before": ((1, 9, 8), (16, 16), 3, (0, 2, 2, 1)),
    "a dilation of rows": ((1, 12, 12), (16, 16), 3, (2, 1), (2, 1)),
    "an image smaller than the filters": ((2, 2, 1), (32, 8)),
    "one pixel": ((3, 1, 1), (16, 8)),
    "V-Net's": ((1, 6, 9, 15), (16, 16), 5, 2),
    "nnU-Net's, several chunks and tiles": ((2, 3, 9, 20), (96, 32)),
    "depths without padding": ((1, 5, 6, 8), (32, 16), 3, (0, 1, 1)),
    "causal in depth": ((1, 4, 7, 7), (16, 24), 3, (2, 1, 1, 0, 1, 1)),
    "one depth of filters": ((2, 3, 8, 16), (32, 8), (1, 3, 3), (0, 1, 1)),
    "one row of filters": ((1, 5, 6, 18), (16, 16), (3, 1, 3), (1, 0, 1)),
    "a dilation of depths and rows": ((1, 9, 8, 10), (16, 8), 3, (2, 3, 1), (2, 3, 1)),
    "an image of one depth": ((2, 1, 5, 5), (16, 8)),
    "96 filters, a column at a time": ((1, 2, 9, 20), (48, 96)),
    "120 filters, rows of several tiles": ((1, 2, 3, 75), (32, 120)),
    "72 filters of rows that share their padding": ((3, 2, 7, 7), (96, 72)),
    "Wan's, causal in depth": ((1, 4, 9, 34), (96, 96), 3, (2, 1, 1, 0, 1, 1)),
    "96 filters of 2 x 3 x 5, dilated rows": ((1, 3, 7, 19), (32, 96), (2, 3, 5), 2, (1, 2, 1)),
}
"""The images, channels in and out, and what follows."""
LAST_LAYERS: dict[str, tuple[Any, ...]] = {
    "3 filters": ((2, 11, 21), (64, 3)),
    "one filter": ((1, 9, 40), (32, 1)),
    "2 filters of 5 x 5": ((1, 14, 9), (16, 2), 5, 2),
    "7 filters of a volume": ((1, 4, 7, 7), (32, 7)),
    "30 filters": ((1, 8, 33), (48, 30)),
    "100 filters": ((1, 2, 5, 22), (48, 100)),
}
"""The same of layers with other numbers of filters, which are not for dgrad."""
FEW_FILTERS = Family(
    kernel=FewFilters(),
    most=3,
    offers=range(1, 4),
    layers=[
        filters(op, *layer, dtype=(FP16, BF16)[i % 2])
        for op, layers in (("fprop", LAYERS | LAST_LAYERS), ("dgrad", LAYERS))
        for i, layer in enumerate(layers.values(), op == "fprop")
    ],
    epilogues=[
        filters("fprop", (2, 7, 18) if channels[1] < 96 else (2, 2, 4, 9), channels, **fused)
        for i, fused in enumerate(FUSED)
        for channels in [((16, 16), (48, 96), (32, 3))[i % 3 if "residual" not in fused else i % 2]]
    ],
    few_blocks=[
        filters(op, x, channels)
        for op in ("fprop", "dgrad")
        for x, channels in (
            *(((3, 19, 14), (32, 16)), ((3, 19, 40), (32, 16)), ((2, 3, 9, 30), (32, 16))),
            ((2, 3, 9, 40), (96, 96)),  # streamed
        )
    ],
    blocks_and_tiles=lambda launch: (launch.grid[0], launch.arguments[-3]),
    spoilt=[
        filters(op, x, (32, 16), kernel)
        for i, x in enumerate(((2, 9, 7), (2, 9, 14), (2, 9, 40), (2, 4, 9, 7)))
        for op, kernel in (("fprop", (3, 4)[i % 2]), ("dgrad", (4, 3)[i % 2]))
    ]
    + [filters(op, (2, 3, 5, 9), (48, 96)) for op in ("fprop", "dgrad")],
    patterns=[
        filters(op, x, channels, 3, 0)
        for op in ("fprop", "dgrad")
        for x, channels in (((2, 14, 15), (32, 16)), ((2, 4, 8, 9), (48, 96)))
    ],
    not_computed=[
        filters(**({"op": "fprop", "x": (2, 20, 20), "channels": (32, 32)} | changed))
        for changed in (
            {"op": "wgrad"},
            {"dtype": FP32},
            PLAIN,
            {"stride": 2},
            {"dilation": 2},
            {"groups": 2, "channels": (64, 32)},
            {"channels": (24, 32)},
            {"op": "dgrad", "channels": (32, 12)},
            {"channels": (32, 12), "residual": True},
            {"channels": (32, 30), "kernel": 9},
            {"channels": (32, 72)},
            {"x": (2, 9, 9, 9), "channels": (32, 128)},
            {"kernel": 7, "channels": (32, 40)},
            {"kernel": (1, 3)},
            {"kernel": (3, 1)},
            {"kernel": (2, 10)},
            {"x": (2, 9, 9, 9), "kernel": (1, 1, 3), "padding": (0, 0, 1)},
            # the filters do not fit into shared memory
            {"channels": (2048, 32)},
            {"x": (2, 9, 9, 9), "channels": (128, 64)},
            # nor do those of a stage
            {"x": (2, 9, 9, 9), "channels": (16, 120), "kernel": 9},
            *ALIGNMENTS,
        )
    ],
    compiled=[
        filters(op, x, (64, 32))
        for op in ("fprop", "dgrad")
        for x in ((64, 56, 56), (2, 32, 32, 32))
    ]
    + [filters(op, (1, 4, 480, 832), (96, 96)) for op in ("fprop", "dgrad")],
    gpus=(H200, TINY),
    draw=_draw_filters,
    draws=60,
)

SIGNALS: dict[str, tuple[Any, ...]] = {
    "positional, 48 a group": ("fprop dgrad wgrad", (2, 150), 2, 48, 32, 1, 16),
    "HiFi-GAN, 32 channels": ("fprop dgrad", (2, 300), 1, 32, 11, 1, 25, 5),
    "HiFi-GAN, upsampling": ("dgrad", (2, 160), 1, (32, 64), 16, 8, 4),
    "an odd number of planes": ("fprop dgrad wgrad", (1, 90), 2, 24, 7, 1, 3),
    "one plane, an even number of taps": ("fprop dgrad wgrad", (2, 70), 2, 8, 4, 1, 2),
    "one plane in, an odd number of taps": ("fprop dgrad", (1, 80), 1, (8, 40), 5, 1, 2, 3),
    "one plane out": ("fprop dgrad", (1, 80), 1, (40, 8), 3, 1, 1),
    "128 channels": ("fprop", (1, 70), 1, 128, 3, 1, 1),
    "no padding": ("fprop dgrad wgrad", (3, 41), 2, 16, 9),
    "padding as large as the kernel": ("fprop dgrad wgrad", (1, 20), 2, 16, 3, 1, 3),
    "other padding after than before": ("fprop dgrad wgrad", (1, 37), 2, 16, 6, 1, (1, 4)),
    "a signal shorter than the kernel": ("fprop dgrad wgrad", (2, 5), 2, 16, 21, 1, 10),
    "one position": ("fprop dgrad wgrad", (3, 1), 2, 16, 3, 1, 1),
    "a stride larger than the kernel": ("dgrad", (1, 61), 2, 8, 3, 5),
    "a stride that divides no length": ("dgrad", (2, 47), 1, (24, 16), 7, 3, 2),
    "positions that no output reads": ("dgrad", (1, 50), 1, 16, 3, 4),
    "rows of images": ("fprop dgrad", (2, 40), 1, 16, 3, 1, 1, 1, 3),
    "64 channels of a group": ("wgrad", (2, 80), 2, (64, 16), 5, 1, 2, 2),
    "rows of images with groups": ("wgrad", (2, 40), 2, 16, 3, 1, 1, 1, 3),
    "one tap of a group": ("fprop dgrad wgrad", (2, 66), 2, 24, 1),
}
"""The operations, (images, length), groups, channels a group, the kernel and what follows."""


def _signals(*ops: str) -> list[ConvProblem]:
    cases = [(op, layer) for of, *layer in SIGNALS.values() for op in of.split() if op in ops]
    return [signal(op, *layer, dtype=(FP16, BF16)[i % 2]) for i, (op, layer) in enumerate(cases)]


def _not_computed(op: str, *changes: dict[str, Any]) -> list[ConvProblem]:
    layer = {"op": op, "x": (2, 200), "groups": 2, "width": 16, "kernel": 3}
    return [signal(**(layer | changed)) for changed in changes]  # type: ignore[arg-type]


IMPLICIT_GEMM_1D = Family(
    kernel=ImplicitGemm1d(),
    gpus=(H200, TINY),
    most=3,
    offers=range(1, 4),
    layers=_signals("fprop", "dgrad"),
    epilogues=[
        signal("fprop", (2, 75), 2, (16, (24, 8))[i % 2], 3, padding=1, **fused)
        for i, fused in enumerate(FUSED)
    ],
    spoilt=[
        signal(op, (2, 150), 2, width, kernel, padding=1)
        for width in (8, 16, 24)
        for op, kernel in (("fprop", 3), ("dgrad", 4), ("fprop", 4), ("dgrad", 3))
    ],
    patterns=[signal(op, (2, 150), 2, 24, 7) for op in ("fprop", "dgrad")],
    not_computed=_not_computed(
        "fprop",
        {"dtype": FP32},
        PLAIN,
        {"stride": 2},
        {"op": "dgrad", "stride": 2, "dilation": 2},
        {"width": 12},
        {"width": (16, 12)},
        {"groups": 1, "width": 136},
        {"groups": 1, "kernel": 1},
        # the input does not fit into shared memory
        {"kernel": 500, "dilation": 100, "x": (1, 60_000)},
        *ALIGNMENTS,
    ),
    compiled=[signal(op, (2, 200), 2, 48, 33, padding=16) for op in ("fprop", "dgrad")],
    draw=lambda choose: _draw_signal(choose, ("fprop", "dgrad")),
    draws=30,
)

WGRAD = Family(
    kernel=ImplicitGemm1dWgrad(),
    gpus=(H200, TINY),
    most=3,
    offers=range(1, 4),
    layers=_signals("wgrad"),
    spoilt=[signal("wgrad", (2, 90), 2, width, kernel) for width in (16, 64) for kernel in (3, 9)],
    patterns=[
        signal("wgrad", (2, 150), 2, 16, 9),
        signal("wgrad", (2, 90), 2, 64, 3),
        signal("wgrad", (2, 150), 2, 16, 9, padding=4),
    ],
    not_computed=_not_computed("wgrad", {"stride": 2}, {"width": 20}, {"groups": 1}, PLAIN),
    compiled=[signal("wgrad", (2, 200), 2, 48, 33, padding=16)],
    draw=lambda choose: _draw_signal(choose, ("wgrad",)),
    draws=15,
)
