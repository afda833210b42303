"""Small grouped convolutions, with the widths of those of well-known models, and what is tested of
each of their kernels."""

from __future__ import annotations

import random
from typing import Any

import torch

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.grouped.grouped import Grouped
from cudnn_autotune.kernels.grouped.grouped_wgrad import GroupedWgrad
from support.conv.fused_cases import NAMES
from support.kernels.battery import Family

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LAYERS = {
    "RegNetY-3.2": ((2, 14, 14), 3, 24),
    "RegNetY-3.2, images of 7 x 7": ((5, 7, 7), 3, 24),
    "RegNetY-3.2, stride 2": ((2, 14, 14), 3, 24, 3, 2),
    "ResNeXt, 4 wide": ((1, 20, 12), 8, 4),
    "ResNeXt, 8 wide, stride 2": ((1, 18, 14), 4, 8, 3, 2),
    "16 wide": ((1, 9, 17), 2, 16),
    "32 wide": ((1, 8, 8), 2, 32),
    "48 wide": ((1, 7, 9), 2, 48),
    "56 wide": ((1, 5, 7), 2, 56),
    "40 wide, stride 2": ((1, 9, 9), 2, 40, 3, 2),
}
"""(images, height, width), groups, channels a group; kernel and stride if not 3 and 1."""
EDGES: dict[str, tuple[Any, ...]] = {  # the operations, and the layer
    "an image smaller than a tile": ("fprop wgrad", (1, 2, 3), 2, 8),
    "one pixel": ("fprop dgrad wgrad", (3, 1, 1), 2, 24),
    "a kernel larger than the image": ("fprop dgrad wgrad", (1, 3, 2), 2, 8, 7, 1, 3),
    "padding as large as the kernel": ("fprop wgrad", (1, 6, 5), 2, 16, 3, 1, 4),
    "padding larger than the kernel, stride 2": ("dgrad", (1, 6, 5), 2, 8, 3, 2, 5),
    "no padding": ("fprop wgrad", (1, 11, 13), 2, 8, 5, 1, 0),
    "1x1": ("dgrad wgrad", (2, 9, 9), 2, 16, 1, 1, 0),
    "1x1, stride 2": ("fprop dgrad wgrad", (2, 9, 8), 2, 16, 1, 2, 0),
    "2x2, stride 2": ("dgrad", (1, 8, 9), 2, 8, 2, 2, 0),
    "not square": ("fprop dgrad wgrad", (1, 10, 12), 2, 8, (3, 5), (2, 1), (1, 2)),
    "a kernel of one row": ("fprop", (1, 10, 12), 2, 8, (1, 7), (1, 2), (0, 3)),
    "other padding after than before": ("fprop dgrad wgrad", (1, 9, 9), 2, 8, 3, 2, (0, 1, 2, 1)),
    "rows of the input that no output reads": ("dgrad", (1, 10, 10), 2, 8, 3, 2, 0),
    "other widths in than out": ("fprop wgrad", (1, 9, 9), 2, (8, 24)),
    "other widths in than out, merged": ("fprop dgrad wgrad", (1, 9, 9), 4, (12, 4), 3, 2),
    "20 wide": ("dgrad wgrad", (1, 6, 6), 4, 20),
    "64 wide, stride 2": ("dgrad", (1, 9, 9), 2, 64, 3, 2),
    "5x5, merged, stride 2": ("fprop dgrad", (1, 9, 9), 4, 4, 5, 2, 2),
    "7x7": ("wgrad", (1, 9, 9), 2, 24, 7, 1, 3),
}


def grouped(
    op: str,
    x: tuple[int, int, int],
    groups: int,
    width: int | tuple[int, int],
    kernel: int | tuple[int, int] = 3,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, ...] = 1,
    **options: Any,
) -> ConvProblem:
    """A problem with an input of (images, height, width) and ``width`` channels a group."""
    c, k = (width, width) if isinstance(width, int) else width
    kernels = (kernel, kernel) if isinstance(kernel, int) else kernel
    options = {"dtype": torch.float16, "memory_format": torch.channels_last, **options}
    shape = (x[0], groups * c, *x[1:])
    return ConvProblem(
        op, shape, (groups * k, c, *kernels), stride, padding, groups=groups, **options
    )


def _edges(*ops: str) -> list[ConvProblem]:
    """The problems of these operations, each in one of two dtypes."""
    cases = [(op, layer) for of, *layer in EDGES.values() for op in of.split() if op in ops]
    return [grouped(op, *c, dtype=(BF16, FP32)[i % 2]) for i, (op, c) in enumerate(cases)]


def _draw(choose: random.Random, ops: tuple[str, ...]) -> ConvProblem:
    kernel, stride = choose.choice([(3, 1), (3, 2), (5, 2), (1, 1)])
    return grouped(
        choose.choice(ops),
        (choose.randint(1, 5), choose.randint(3, 30), choose.randint(3, 30)),
        2 * choose.randint(1, 3),
        choose.choice([4, 8, 24]),
        kernel,
        stride,
        choose.randint(kernel // 4, kernel),
        dtype=choose.choice((FP16, BF16, FP32)),
    )


def _changed(op: str, *changes: dict[str, Any]) -> list[ConvProblem]:
    """Changes, each of one layer that is offered."""
    layer = {"op": op, "x": (2, 20, 20), "groups": 4, "width": 24, "padding": 3}
    return [grouped(**(layer | change)) for change in changes]  # type: ignore[arg-type]


PLAIN: dict[str, Any] = {"memory_format": torch.contiguous_format}
ALL_FUSED: dict[str, Any] = {"bias": True, "residual": True, "activation": "silu"}
NOT_COMPUTED: list[dict[str, Any]] = [
    {"dtype": FP32, "allow_tf32": False},
    {"dtype": torch.float64},
    PLAIN,
    {"dilation": 2},
    {"stride": 3},
    {"width": 2},
    {"width": 4, "groups": 3},
    {"width": 64},
    {"alignment": (8, 32, 32)},
]
_OF_MODELS = [(layer, dtype) for i, layer in enumerate(LAYERS.values()) for dtype in (FP16, FP32)]

GROUPED = Family(
    kernel=Grouped(),
    has_conflicts=False,
    layers=[
        grouped(("fprop", "dgrad")[i // 2 % 2 ^ i % 2], *layer, dtype=dtype)
        for i, (layer, dtype) in enumerate(_OF_MODELS)
    ],
    edges=_edges("fprop", "dgrad"),
    epilogues=[
        *(grouped("fprop", (1, 7, 9), 2, 8, **ALL_FUSED | {"activation": n}) for n in NAMES),
        *(
            grouped("fprop", (1, 7, 9), 2, width, dtype=dtype, **dict.fromkeys(epilogue, True))
            for i, epilogue in enumerate((("bias",), ("residual",), ("bias", "residual")))
            for j, width in enumerate((4, 24))
            for dtype in [(FP16, FP32)[(i + j) % 2]]
        ),
    ],
    few_blocks=[
        grouped(op, (9, 17, 20), 2, 24, dtype=d) for op in ("fprop", "dgrad") for d in (FP16, FP32)
    ],
    blocks_and_tiles=lambda launch: (launch.grid[1], launch.arguments[12]),
    spoilt=[
        grouped(op, (2, 9, 11), 4, width, 3, 2, dtype=dtype)
        for i, width in enumerate((4, 8, 12))
        for op, dtype in (("fprop", (FP16, FP32)[i % 2]), ("dgrad", (FP32, FP16)[i % 2]))
    ],
    patterns=[
        *(grouped(op, (6, 14, 19), 4, 4, padding=0) for op in ("fprop", "dgrad")),
        grouped("dgrad", (4, 14, 19), 4, 4, stride=2, padding=0),
        grouped("fprop", (4, 14, 19), 2, 12, padding=0),
        grouped("fprop", (4, 12, 19), 2, 8, padding=0),
        grouped("fprop", (6, 14, 19), 4, 4, padding=1),
    ],
    not_computed=_changed(
        "fprop",
        *NOT_COMPUTED,
        {"op": "wgrad"},
        {"kernel": 8},
        {"op": "dgrad", "width": 72, "stride": 2},
        {"groups": 1},
        {"alignment": (32, 8, 32)},
        {"alignment": (32, 32, 8)},
        # the filters do not fit into shared memory
        {"op": "dgrad", "stride": 2, "width": 64, "kernel": 7},
    ),
    large=[grouped("fprop", (64, 28, 28), 8, w, dtype=d) for w in (4, 24) for d in (FP16, FP32)],
    compiled=[
        grouped("fprop", (64, 14, 14), 24, 24),
        grouped("fprop", (64, 14, 14), 24, 24, dtype=FP32, bias=True),
        grouped("dgrad", (64, 56, 56), 32, 4, dtype=FP32),
        grouped("dgrad", (64, 56, 56), 4, 16, 1, 2, 0, dtype=FP32),
        grouped("dgrad", (64, 28, 28), 24, 24, 3, 2),
        grouped("fprop", (64, 56, 56), 32, 4, **ALL_FUSED),
        grouped("fprop", (64, 56, 56), 32, 4, activation="elu(2)"),
    ],
    draw=lambda choose: _draw(choose, ("fprop", "dgrad")),
    draws=12,
)

WGRAD = Family(
    kernel=GroupedWgrad(),
    layers=[
        grouped("wgrad", *layer, dtype=dtype)
        for layer, dtype in _OF_MODELS
        # Sums of others take more registers than a thread has.
        if dtype != FP32 or layer != LAYERS["56 wide"]
    ],
    edges=_edges("wgrad"),
    few_blocks=[grouped("wgrad", (9, 17, 20), 2, 24, dtype=dtype) for dtype in (FP16, FP32)],
    blocks_and_tiles=lambda launch: (launch.grid[1], launch.arguments[10]),
    spoilt=[
        grouped("wgrad", (2, 9, 11), 4, width, 3, stride, 0, dtype=dtype)
        for width, stride, dtype in ((4, 1, FP16), (4, 2, FP32), (24, 1, FP32), (24, 2, FP16))
    ],
    patterns=[grouped("wgrad", (2, 14, 19), 4, width, padding=0) for width in (4, 8)],
    not_computed=[
        *_changed("wgrad", *NOT_COMPUTED, {"op": "fprop"}, {"op": "dgrad"}),
        grouped("wgrad", *LAYERS["56 wide"], dtype=FP32),
    ],
    large=[grouped("wgrad", (64, 14, 14), 24, 24)],
    compiled=[grouped("wgrad", (64, 14, 14), 24, 24, dtype=dtype) for dtype in (FP16, FP32)],
    draw=lambda choose: _draw(choose, ("wgrad",)),
    draws=9,
)
