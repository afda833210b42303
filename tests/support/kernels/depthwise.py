"""Small depthwise convolutions, and what is tested of each of their kernels."""

from __future__ import annotations

import random
from typing import Any

import torch

from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.kernels.depthwise.depthwise import Depthwise
from cudnn_autotune.kernels.depthwise.depthwise_1d import Depthwise1d
from cudnn_autotune.kernels.depthwise.depthwise_mma import DepthwiseMma
from cudnn_autotune.kernels.depthwise.depthwise_planes import DepthwisePlanes
from cudnn_autotune.kernels.depthwise.depthwise_tile import block_tiles
from cudnn_autotune.kernels.depthwise.depthwise_wgrad import DepthwiseWgrad
from cudnn_autotune.kernels.depthwise.depthwise_wgrad_mma import DepthwiseWgradMma
from support.conv.fused_cases import NAMES
from support.cuda_emulation.checks import H200
from support.kernels.battery import TINY, Family

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
PLAIN: dict[str, Any] = {"memory_format": torch.contiguous_format}
ALL_FUSED: dict[str, Any] = {"bias": True, "residual": True, "activation": "silu"}


def depthwise(
    op: str, c: int, size: tuple[int, ...], kernel: tuple[int, ...], **options: Any
) -> ConvProblem:
    """A problem of 2 images (``n``) with ``c`` channels, in float16 and channels_last, unless
    ``options`` say otherwise."""
    layout = CHANNELS_LAST.get(len(size), torch.contiguous_format)
    options = {"dtype": torch.float16, "memory_format": layout, "allow_tf32": False, **options}
    n, k = options.pop("n", 2), c * options.pop("multiplier", 1)
    return ConvProblem(op, (n, c, *size), (k, 1, *kernel), groups=c, **options)


def both(*layers: tuple[Any, ...], **options: Any) -> list[ConvProblem]:
    """The problems of fprop and dgrad of layers: channels, size, kernel and options of each."""
    return [
        depthwise(op, *layer, **{**options, **more})
        for *layer, more in layers
        for op in ("fprop", "dgrad")
    ]


def wgrad(
    n: int, c: int, size: tuple[int, ...], kernel: tuple[int, ...], **options: Any
) -> ConvProblem:
    return depthwise("wgrad", c, size, kernel, n=n, **options)


def same(
    n: int,
    c: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    op: str = "fprop",
    **options: Any,
) -> ConvProblem:
    """A problem whose padding is half of the kernel."""
    options = {"padding": tuple(k // 2 for k in kernel), **options}
    return depthwise(op, c, size, kernel, n=n, **options)


def _draw(choose: random.Random, ops: tuple[str, ...], **options: Any) -> ConvProblem:
    """Sizes, paddings, dilations and channels vary; few kernels are compiled."""
    op = choose.choice(ops)
    kernel, stride, dtype = choose.choice((((3, 3), 2, FP16), ((3, 5), 2, BF16), ((3, 3), 1, FP32)))
    is_plain = "memory_format" in options
    return depthwise(
        op,
        choose.randint(2, 9) if is_plain else 4 * choose.randint(2, 12),
        (choose.randint(7, 20), choose.choice((8, 16))),
        kernel,
        n=choose.randint(1, 3),
        dtype=dtype,
        stride=stride,
        padding=(choose.randint(0, 6), 1, choose.randint(0, 6), 1),
        dilation=(choose.choice((1, 2, 3)), 1) if stride == 1 or op == "wgrad" else 1,
        **options,
    )


def _epilogues(layout: torch.memory_format) -> list[ConvProblem]:
    return [
        depthwise(
            *("fprop", 16, (9, 31), (3, 3)),
            bias=bias,
            residual=residual,
            activation=activation,
            dtype=dtype,
            stride=2,
            padding=1,
            memory_format=layout,
        )
        for bias, residual, activation in (
            (True, False, ""),
            (True, True, "silu"),
            (False, True, "relu"),
            (True, False, "hardswish"),
        )
        for dtype in (FP16, FP32)
    ]


def _not_computed(**options: Any) -> list[ConvProblem]:
    """What the kernels on CUDA cores do not compute, in either layout."""
    return [
        depthwise(op, 16, size, kernel, **{**options, **more})
        for op, size, kernel, more in (
            ("wgrad", (9, 9), (3, 3), {}),
            ("fprop", (9, 9), (3, 3), {"dtype": torch.float64}),
            ("fprop", (9, 9), (1, 1), {}),
            ("fprop", (19, 19), (9, 9), {"dtype": FP32}),
            ("fprop", (9, 9), (7, 7), {}),
            ("dgrad", (9, 9), (3, 3), {"stride": 2, "dilation": 2}),
            ("dgrad", (9, 9), (3, 3), {"multiplier": 2}),
            ("dgrad", (9, 8), (3, 3), {"multiplier": 3}),
            ("dgrad", (3, 4, 6), (3, 3, 3), {"multiplier": 3, "dtype": FP32, **PLAIN}),
            # most threads would have no pixel, and there would be more of them than a grid can have
            ("fprop", (9, 9), (3, 3), {"dilation": 19, "padding": 19}),
            ("dgrad", (8, 8), (1, 7), {"dilation": 7**8, "padding": (0, 3 * 7**8)}),
        )
    ]


DEPTHWISE = Family(
    kernel=Depthwise(),
    layers=both(
        # EfficientNet, MobileNet: stride 2
        (24, (18, 18), (3, 3), {"stride": 2, "padding": 1}),
        (16, (13, 12), (5, 5), {"dtype": BF16, "stride": 2, "padding": 2}),
        # TensorFlow's padding: none before
        (16, (12, 14), (3, 3), {"stride": 2, "padding": (0, 0, 1, 1)}),
        # ConvNeXt
        (8, (15, 18), (7, 7), {"dtype": FP32, "padding": 3}),
        # DeepLab
        (16, (11, 10), (3, 3), {"padding": 3, "dilation": (3, 2)}),
        # X3D
        (10, (4, 7, 9), (3, 3, 3), {"padding": 1}),
        (8, (5, 8, 9), (3, 3, 3), {"dtype": FP32, "padding": 1, "stride": 2}),
    ),
    edges=[
        *both(
            # odd channels: one a thread
            (9, (11, 14), (3, 3), {"padding": 1}),
            (9, (7, 7), (5, 5), {"dtype": FP32, "padding": 2, "stride": 2}),
            (8, (6, 5, 5), (5, 1, 1), {"dtype": BF16, "padding": (2, 0, 0), "stride": (3, 1, 1)}),
            (8, (6, 5, 5), (3, 1, 2), {"dtype": FP32, "dilation": (2, 1, 3), "stride": (2, 1, 1)}),
            # stride above the kernel, below and above it; stride and dilation
            (8, (9, 11), (2, 3), {"dtype": FP32, "stride": (3, 4), "padding": (1, 2)}),
            (
                *(8, (16, 17), (3, 4)),
                {"dtype": FP32, "stride": (2, 3), "dilation": (3, 2), "padding": 4},
            ),
            # padding beyond the kernel, an image below it
            (8, (2, 3), (5, 3), {"dtype": FP32, "padding": (6, 5), "stride": (2, 1)}),
            (8, (1, 1), (3, 3), {"padding": 1}),
            # hardly aligned
            (16, (6, 6), (3, 3), {"stride": 2, "alignment": (32, 32, 2)}),
        ),
        # several outputs a channel
        depthwise("fprop", 8, (9, 8), (3, 3), multiplier=3),
        depthwise("fprop", 8, (3, 4, 6), (3, 3, 3), multiplier=3, dtype=FP32),
    ],
    epilogues=_epilogues(torch.channels_last),
    spoilt=both((16, (9, 8), (3, 3), {"stride": 2, "padding": 1})),
    patterns=both((8, (14, 15), (3, 3), {})),
    not_computed=[*_not_computed(), depthwise("fprop", 16, (9, 9), (3, 3), **PLAIN)],
    compiled=[
        depthwise("fprop", 96, (28, 28), (3, 3), stride=2, padding=1),
        depthwise("dgrad", 96, (28, 28), (5, 5), dtype=BF16, stride=2, padding=2),
        depthwise("fprop", 9, (9, 9), (3, 3), dtype=BF16, **ALL_FUSED),
        depthwise("fprop", 672, (14, 14), (5, 5), n=64, stride=2, padding=2),
        depthwise("dgrad", 144, (56, 56), (5, 5), n=64, stride=2, padding=2, dtype=BF16),
        depthwise("fprop", 96, (112, 112), (3, 3), n=64, stride=2, padding=1, dtype=FP32),
        depthwise("fprop", 96, (56, 56), (3, 3), padding=1, bias=True, activation="silu"),
    ],
    draw=lambda choose: _draw(choose, ("fprop", "dgrad")),
    draws=50,
    offers=range(1, 20),
)

TILE = Family(
    kernel=DEPTHWISE.kernel,
    settings=lambda _, problem, gpu: [tile.settings for tile in block_tiles(problem, gpu)],
    layers=both(
        # several tiles along both sides, and the last ones are not whole
        (96, (40, 33), (3, 3), {"stride": 2, "padding": 1}),
        (48, (31, 30), (5, 5), {"stride": 2, "padding": 2, "dtype": BF16}),
        (32, (37, 29), (3, 3), {"padding": 1}),
    ),
    edges=both(
        # the last block's channels are not whole
        (104, (9, 9), (3, 3), {"stride": 2, "padding": 1}),
        (8, (6, 7), (3, 3), {"stride": 2}),
        # stride above the kernel, along one side only; padding beyond the kernel
        (72, (9, 11), (2, 3), {"stride": (3, 4), "padding": (1, 2)}),
        (40, (7, 30), (3, 4), {"stride": (1, 2), "padding": 3, "dtype": FP32}),
        (24, (5, 12), (5, 3), {"stride": (2, 1), "padding": (6, 5)}),
        # TensorFlow's padding
        (16, (12, 14), (3, 3), {"stride": 2, "padding": (0, 0, 1, 1), "dtype": FP32}),
    ),
    spoilt=both((16, (19, 18), (3, 3), {"stride": 2, "padding": 1})),
    patterns=both((16, (19, 18), (3, 3), {"stride": 2, "padding": 1})),
    not_computed=[
        depthwise("fprop", 54, (18, 18), (3, 3), stride=2, padding=1),
        depthwise("fprop", 16, (18, 18), (3, 3), stride=2, alignment=(32, 32, 2)),
        depthwise("fprop", 16, (18, 18), (3, 3), stride=2, dilation=3),
        depthwise("fprop", 16, (18, 18), (1, 1), stride=2),
        depthwise("fprop", 16, (18, 18), (5, 5), padding=2),  # depthwise_mma computes it
        depthwise("fprop", 16, (18, 18), (3, 3), stride=2, **PLAIN),
        depthwise("fprop", 16, (4, 9, 9), (3, 3, 3)),
    ],
    draw=lambda choose: depthwise(
        choose.choice(("fprop", "dgrad")),
        8 * choose.randint(1, 12),
        (choose.randint(7, 40), choose.randint(7, 40)),
        (3, 3),
        stride=2,
        padding=(choose.randint(0, 4), 1, choose.randint(0, 4), 1),
    ),
    draws=12,
)

PLANES = Family(
    kernel=DepthwisePlanes(),
    layers=both(
        (3, (9, 16), (3, 3), {"padding": 1}),
        (5, (14, 12), (3, 3), {"stride": 2, "padding": 1}),
        (2, (13, 11), (5, 5), {"dtype": BF16, "stride": 2, "padding": 2}),
        (3, (18, 12), (7, 7), {"dtype": FP32, "padding": 3}),
        # a Conformer; a long row, and one of odd length
        (3, (1, 100), (1, 31), {"dtype": FP32, "padding": (0, 15)}),
        (2, (1, 1500), (1, 31), {"dtype": FP32, "padding": (0, 30, 0, 0)}),
        (2, (1301,), (15,), {"dtype": FP32, "padding": 2, "stride": 2}),
        # X3D
        (3, (5, 8, 8), (3, 3, 3), {"dtype": FP32, "padding": 1}),
        (2, (5, 8, 9), (3, 3, 3), {"padding": 1, "stride": 2}),
        (2, (7, 8, 8), (5, 1, 1), {"padding": (2, 0, 0), "dilation": (2, 1, 1)}),
        (2, (4, 8, 8), (1, 3, 3), {"dtype": FP32, "padding": (0, 1, 1), "stride": (1, 2, 2)}),
        **PLAIN,
    ),
    edges=both(
        # more columns than a tile has
        (2, (6, 300), (3, 3), {"padding": 1, "stride": 2}),
        # dilation
        (3, (13, 12), (3, 3), {"padding": (4, 2), "dilation": (3, 2)}),
        (3, (16, 12), (3, 3), {"dtype": FP32, "stride": (2, 1), "dilation": (3, 2), "padding": 4}),
        # stride above the kernel; padding beyond the kernel, an image below it
        (3, (9, 11), (2, 3), {"dtype": FP32, "stride": (3, 4), "padding": (1, 2)}),
        (3, (2, 3), (5, 3), {"dtype": FP32, "padding": (6, 5), "stride": (2, 1)}),
        (3, (1, 1), (3, 3), {"padding": 1}),
        # hardly aligned
        (3, (8, 16), (3, 3), {"stride": 2, "alignment": (32, 32, 2)}),
        **PLAIN,
    ),
    every_offer=both((3, (8, 16), (3, 3), {"stride": 2, "alignment": (32, 32, 2)}), **PLAIN),
    epilogues=_epilogues(torch.contiguous_format),
    spoilt=both((16, (9, 8), (3, 3), {"stride": 2, "padding": 1}), **PLAIN),
    patterns=both((8, (14, 15), (3, 3), {}), **PLAIN),
    not_computed=[
        *_not_computed(**PLAIN),
        depthwise("fprop", 16, (9, 9), (3, 3)),
        ConvProblem("fprop", (1, 16, 9, 9), (16, 2, 3, 3), groups=8, dtype=FP16),
        # what one thread has does not fit into its registers
        depthwise("dgrad", 8, (64, 64), (3, 3), stride=16, **PLAIN),
        # a loop over the columns between taps is unrolled
        depthwise("fprop", 8, (4000,), (3,), dilation=600, padding=600),
    ],
    compiled=[
        depthwise("fprop", 12, (1, 280), (1, 31), dtype=FP32, padding=(0, 15), **PLAIN),
        depthwise("dgrad", 6, (8, 8, 8), (3, 3, 3), dtype=BF16, stride=2, **PLAIN),
    ],
    draw=lambda choose: _draw(choose, ("fprop", "dgrad"), **PLAIN),
    draws=50,
)

ONE_DIMENSION = Family(
    kernel=Depthwise1d(),
    offers=range(2, 3),
    # Rows begin at all places of a vector, in x and in y.
    layers=[
        depthwise(op, 3, (length,), (taps,), n=3, dtype=dtype, padding=padding)
        for i, (taps, padding) in enumerate(
            ((2, 1), (3, 1), (4, 3), (4, 0), (5, (4, 0)), (9, 4), (7, (1, 9)))
        )
        for j, length in enumerate((4, 7, 8, 61, 64, 333))
        for op, dtype in [(("fprop", "dgrad")[(i + j) % 2], (FP16, BF16, FP32)[(i + 2 * j) % 3])]
    ],
    edges=both((3, (1,), (4,), {"n": 3, "padding": 3}), (3, (1,), (5,), {"padding": (4, 0)})),
    epilogues=[
        depthwise("fprop", 5, (61,), (4,), padding=3, **dict.fromkeys(epilogue, True), **more)
        for i, epilogue in enumerate((("bias",), ("residual",), ("bias", "residual")))
        for j, activation in enumerate(("", "silu", "leaky_relu(0.1)"))
        for more in [{"activation": activation, "dtype": (FP16, BF16, FP32)[(i + j) % 3]}]
    ],
    spoilt=both(*((3, (70,), (4,), {"dtype": d, "padding": 3}) for d in (FP16, BF16, FP32))),
    patterns=both((4, (90,), (5,), {})),
    not_computed=[
        depthwise("wgrad", 8, (50,), (4,), padding=3),
        depthwise("fprop", 8, (50,), (1,), padding=3),
        depthwise("fprop", 8, (50,), (10,), padding=3),
        depthwise("fprop", 8, (50,), (4,), padding=3, stride=2),
        depthwise("fprop", 8, (50,), (4,), padding=3, dilation=2),
        depthwise("fprop", 8, (50,), (4,), padding=3, multiplier=2),
        depthwise("fprop", 8, (50,), (4,), padding=3, alignment=(8, 32, 32)),
        depthwise("fprop", 8, (50,), (4,), padding=3, alignment=(32, 32, 8)),
        depthwise("fprop", 8, (9, 9), (3, 3), padding=1),
    ],
    compiled=[depthwise("fprop", 512, (1001,), (4,), dtype=BF16, padding=3, **ALL_FUSED)],
    draw=lambda choose: depthwise(
        choose.choice(("fprop", "dgrad")),
        choose.randint(2, 20),
        (choose.randint(9, 400),),
        (taps := choose.randint(2, 9),),
        n=choose.randint(1, 4),
        dtype=choose.choice((FP16, BF16, FP32)),
        padding=(choose.randint(0, taps + 2), choose.randint(0, taps + 2)),
        alignment=(16, choose.choice((2, 4, 16)) * 2, 16),
    ),
    draws=30,
)


def _mma(choose: random.Random) -> ConvProblem:
    padding = tuple(choose.randint(0, 7) for _ in range(4))
    size = tuple(
        choose.randint(max(1, 5 - low - high), 30)
        for low, high in zip(padding[:2], padding[2:], strict=True)
    )
    return same(
        choose.randint(1, 5), 8 * choose.randint(1, 3), size, (5, 5), "dgrad", padding=padding
    )


MMA = Family(
    kernel=DepthwiseMma(),
    most=1,
    has_conflicts=False,
    layers=[
        same(3, 24, (13, 56), (7, 7)),  # a strip has eight blocks of columns; ConvNeXt
        same(5, 16, (9, 28), (7, 7), "dgrad"),  # four
        same(9, 16, (14, 14), (7, 7), "dgrad"),  # two
        same(17, 8, (7, 7), (7, 7)),  # one
        same(1, 8, (5, 120), (5, 5), "dgrad"),  # sixteen
        same(2, 8, (12, 20), (13, 13)),  # two warps share a filter; RepLKNet
        same(1, 8, (18, 18), (31, 31), "dgrad"),  # four do
        same(2, 16, (12, 9), (3, 11), "dgrad"),
        same(2, 16, (23, 9), (11, 1)),
    ],
    edges=[
        *(
            same(2, 24, size, kernel, op, padding=padding, dtype=BF16, **PLAIN)
            for op, size, kernel, padding in (
                ("fprop", (600,), (31,), (15,)),  # a signal in segments, conv1d of speech models
                ("dgrad", (600,), (31,), (30, 0)),  # causal
                ("dgrad", (301,), (65,), (32,)),  # rows begin at any address
                ("fprop", (11, 24), (5, 5), (2, 2)),
                ("dgrad", (11, 18), (5, 5), (3, 1)),
                ("fprop", (10, 13), (5, 5), (0, 8)),
            )
        ),
        same(1, 16, (6, 24), (5, 5), alignment=(2, 2, 2), dtype=BF16, **PLAIN),
    ],
    every_offer=[same(3, 40, (21, 17), kernel) for kernel in ((7, 7), (31, 31))],
    epilogues=[
        *(
            same(2, 24, (9, 11), (5, 5), bias=True, residual=i % 2 == 0, activation=name, **layout)
            for i, name in enumerate(NAMES)
            for layout in [{} if i > 2 else PLAIN]
        ),
        same(2, 24, (9, 11), (5, 5), bias=True),
        same(2, 24, (9, 11), (5, 5), residual=True, **PLAIN),
    ],
    spoilt=[
        same(2, 16, (12, 26), (5, 7), op, **layout)
        for op in ("fprop", "dgrad")
        for layout in ({}, PLAIN)
    ],
    patterns=[
        depthwise("fprop", 16, (20, 26), (7, 7)),
        depthwise("dgrad", 16, (20, 26), (7, 7), padding=3),
        depthwise("fprop", 8, (12, 24), (5, 5), **PLAIN),
        depthwise("dgrad", 8, (301,), (65,), padding=32),
        depthwise("fprop", 8, (20, 26), (7, 7), padding=3),
    ],
    not_computed=[
        same(2, 16, (9, 9), (7, 7), "wgrad"),
        same(2, 16, (9, 9), (3, 3)),
        same(2, 16, (9, 9), (7, 7), dtype=FP32),
        same(2, 16, (9, 9), (7, 7), stride=2),
        same(2, 16, (30, 30), (7, 7), dilation=(1, 2)),
        same(2, 12, (9, 9), (7, 7)),
        same(2, 16, (9, 9), (7, 7), alignment=(8, 32, 32)),
        same(64, 16, (7, 7), (7, 7), **PLAIN),  # many copies of 2 bytes
        ConvProblem("fprop", (2, 16, 9, 9), (32, 1, 7, 7), groups=16, dtype=FP16),
        ConvProblem("fprop", (2, 16, 9, 9), (16, 2, 7, 7), groups=8, dtype=FP16),
    ],
    compiled=[
        depthwise("fprop", 96, (56, 56), (7, 7), n=64, padding=3, **ALL_FUSED),
        depthwise("dgrad", 128, (56, 56), (31, 31), n=64, padding=15, dtype=BF16),
        depthwise("fprop", 96, (56, 56), (7, 7), n=64, padding=3, **PLAIN),
        depthwise("fprop", 512, (1001,), (31,), n=32, padding=15),
    ],
    draw=_mma,
    draws=80,
)

WGRAD = Family(
    kernel=DepthwiseWgrad(),
    gpus=(H200, TINY),
    most=1,
    layers=[
        # EfficientNet, MobileNet: stride 2, and TensorFlow's padding
        wgrad(2, 24, (18, 18), (3, 3), stride=2, padding=1),
        wgrad(2, 16, (13, 12), (5, 5), stride=2, padding=2, dtype=BF16),
        wgrad(2, 16, (12, 14), (3, 3), stride=2, padding=(0, 0, 1, 1), dtype=FP32),
        wgrad(2, 13, (14, 14), (5, 5), padding=2),
        # ConvNeXt, in float32, and an odd number of channels
        wgrad(2, 9, (15, 18), (7, 7), padding=3, dtype=FP32),
        wgrad(2, 9, (11, 14), (3, 3), padding=1),
        # more channels than a block has
        wgrad(1, 540, (3, 3), (3, 3), padding=1),
        # DeepLab
        wgrad(1, 8, (11, 10), (3, 3), padding=3, dilation=(3, 2)),
    ],
    edges=[
        # stride above the kernel, stride with dilation, dilation beyond the image
        wgrad(2, 8, (9, 11), (2, 3), stride=(3, 4), padding=(1, 2), dtype=FP32),
        wgrad(2, 8, (16, 17), (3, 4), stride=(2, 3), dilation=(4, 2), padding=4, dtype=BF16),
        wgrad(1, 8, (5, 6), (2, 2), dilation=(9, 8), padding=9, dtype=FP32),
        # padding beyond the kernel, an image below it, a signal
        wgrad(2, 8, (2, 3), (5, 3), stride=(2, 1), padding=(6, 5), dtype=FP32),
        wgrad(2, 8, (1, 30), (1, 9), padding=(0, 4)),
        # R(2+1)D; stride and dilation of depths; none of a depth inside
        wgrad(2, 8, (7, 5, 4), (5, 1, 1), padding=(2, 0, 0), stride=(2, 1, 1), dtype=BF16),
        wgrad(2, 10, (3, 6, 9), (1, 3, 3), padding=(0, 1, 1)),
        wgrad(2, 8, (9, 5, 6), (3, 2, 2), stride=(2, 1, 2), dilation=(3, 2, 1), padding=(4, 1, 0)),
        wgrad(1, 9, (1, 4, 4), (2, 3, 3), padding=(3, 1, 1), dtype=FP32),
        # hardly aligned
        wgrad(2, 16, (6, 6), (3, 3), stride=2, alignment=(32, 32, 2)),
    ],
    every_offer=[
        wgrad(2, 16, (20, 18), (3, 3), stride=2, padding=1),
        wgrad(2, 10, (4, 7, 9), (3, 3, 3), padding=1),
    ],
    spoilt=[
        wgrad(2, 16, (15, 15), (3, 3), stride=2, padding=1),
        wgrad(2, 16, (5, 9, 7), (3, 3, 3), stride=2, padding=1),
    ],
    patterns=[
        wgrad(2, 16, (22, 23), (3, 3)),
        wgrad(2, 16, (23, 25), (3, 3), stride=2),
        wgrad(2, 16, (22, 23), (3, 3), padding=1),
    ],
    not_computed=[
        depthwise("fprop", 16, (9, 9), (3, 3)),
        wgrad(2, 16, (9, 9), (3, 3), multiplier=2),
        wgrad(2, 16, (9, 9), (3, 3), **PLAIN),
        wgrad(2, 16, (9, 9), (3, 3), dtype=torch.float64),
        wgrad(2, 4, (9, 9), (3, 3)),
        wgrad(2, 16, (9, 9), (1, 1)),
        wgrad(2, 16, (9, 9), (9, 9), dtype=FP32),
        wgrad(2, 16, (9, 9), (5, 5), padding=2),  # tensor cores compute it
        wgrad(2, 16, (9, 9, 9), (3, 3, 3), **PLAIN),
        wgrad(2, 16, (99, 9, 9), (65, 3, 3)),
    ],
    compiled=[
        wgrad(64, 96, (112, 112), (3, 3), stride=2, padding=1),
        wgrad(64, 96, (56, 56), (7, 7), padding=3, dtype=FP32),
        wgrad(8, 54, (16, 56, 56), (3, 3, 3), padding=1),
    ],
    draw=lambda choose: _draw(choose, ("wgrad",)),
    draws=60,
)


def _wgrad_mma(choose: random.Random) -> ConvProblem:
    padding = tuple(choose.randint(0, 6) for _ in range(4))
    down, across = choose.randint(9, 16), choose.randint(9, 16)
    size = (down + 4 - padding[0] - padding[2], across + 4 - padding[1] - padding[3])
    channels, layout = 2 * choose.randint(5, 12), choose.choice((PLAIN, {}, {}))
    return wgrad(choose.randint(1, 3), channels, size, (5, 5), padding=padding, **layout)


WGRAD_MMA = Family(
    kernel=DepthwiseWgradMma(),
    gpus=(H200, TINY),
    most=1,
    has_conflicts=False,
    layers=[
        # ConvNeXt: its planes, its last ones of which an mma takes two, and others
        wgrad(1, 16, (21, 19), (7, 7), padding=3),
        wgrad(3, 16, (7, 7), (7, 7), padding=3, dtype=BF16),
        wgrad(1, 6, (9, 70), (7, 7), padding=3),
        wgrad(1, 8, (9, 9), (7, 7), padding=3, alignment=(4, 32, 32)),
        wgrad(2, 8, (10, 14), (7, 7), padding=3, **PLAIN),
        wgrad(1, 5, (9, 13), (7, 7), padding=3, **PLAIN),
        # EfficientNet
        wgrad(2, 24, (14, 14), (5, 5), padding=2),
        wgrad(2, 16, (14, 12), (5, 3), padding=(2, 1), dtype=BF16),
        # RepLKNet, SLaK: filters of several warps and blocks
        wgrad(1, 4, (20, 18), (31, 31), padding=15),
        wgrad(2, 4, (7, 7), (13, 13), padding=6),
        wgrad(1, 2, (5, 20), (21, 5), padding=(10, 2)),
        # signals: Conformer's, one in two dimensions, and one that is shorter than the filter
        wgrad(2, 8, (150,), (31,), padding=15, **PLAIN),
        wgrad(2, 4, (1, 77), (1, 9), padding=(0, 4)),
        wgrad(2, 4, (5,), (15,), padding=9, **PLAIN),
        # padding that is unequal, beyond the filter, and none; an image below the filter
        wgrad(1, 8, (12, 12), (4, 6), padding=(0, 6, 2, 1)),
        wgrad(2, 8, (3, 2), (5, 3), padding=(7, 4)),
        wgrad(1, 8, (12, 15), (5, 5)),
    ],
    every_offer=[
        wgrad(1, 16, (21, 19), (7, 7), padding=3),
        wgrad(1, 4, (20, 18), (31, 31), padding=15),
        wgrad(2, 8, (150,), (31,), padding=15, **PLAIN),
    ],
    spoilt=[wgrad(2, 16, (14, 14), (7, 7), padding=3)],
    patterns=[wgrad(2, 16, (21, 22), (7, 7)), wgrad(2, 8, (301,), (31,))],
    not_computed=[
        depthwise("fprop", 16, (9, 9), (7, 7), **PLAIN),
        wgrad(2, 16, (9, 9), (7, 7), multiplier=2, **PLAIN),
        ConvProblem("wgrad", (2, 16, 9, 9), (16, 2, 7, 7), groups=8, dtype=FP16),
        wgrad(2, 16, (9, 9), (7, 7), dtype=FP32),
        wgrad(2, 16, (9, 9), (5, 5), stride=2),
        wgrad(2, 16, (9, 9), (5, 5), dilation=2),
        wgrad(2, 16, (9, 9), (1, 1)),
        wgrad(2, 16, (9, 9), (3, 3)),  # bound by DRAM
        wgrad(2, 16, (9, 9, 9), (3, 3, 3)),
        wgrad(2, 15, (9, 9), (7, 7)),
        wgrad(2, 16, (9, 9), (7, 7), alignment=(2, 32, 32)),
    ],
    compiled=[
        wgrad(64, 96, (56, 56), (7, 7), padding=3),
        wgrad(8, 128, (56, 56), (31, 31), padding=15, dtype=BF16),
        wgrad(16, 512, (1000,), (31,), padding=15),
    ],
    draw=_wgrad_mma,
    draws=24,
)
