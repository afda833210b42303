"""Random convolution problems of the kinds for which there are implementations beside cuDNN's."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from support.conv.fused_cases import FUNCTIONS

_MOST_PRODUCTS = 2**26  # so that the reference takes milliseconds


def _depthwise(rng: random.Random) -> tuple[int, int, int, int]:
    channels = rng.choice((1, 2, 5, 8, 16, 24, 40, 64, 72, 96, 130))
    width = rng.choice((1, 3, 3, 5, 5, 7, 7, 9, 13, 31))
    return channels, channels * rng.choice((1, 1, 1, 1, 2)), channels, width


def _grouped(rng: random.Random) -> tuple[int, int, int, int]:
    groups = rng.randint(2, 6)
    width = rng.choice((2, 4, 8, 12, 16, 20, 24, 32, 48, 64))
    return groups * width, groups * rng.choice((width, width, 8, 24)), groups, rng.choice((1, 3, 5))


def _narrow_groups(rng: random.Random) -> tuple[int, int, int, int]:
    groups, width = rng.choice((4, 8, 16)), rng.choice((4, 8))
    return groups * width, groups * rng.choice((2, 4, 8)), groups, rng.choice((1, 3, 3))


def _few_channels(rng: random.Random) -> tuple[int, int, int, int]:
    channels = rng.choice((*range(1, 9), 12, 16))
    return channels, rng.choice((3, 8, 12, 16, 24, 32, 64, 96, 130)), 1, rng.choice((3, 3, 4, 7))


def _dense(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.choice((6, 30, 64, 100)), rng.choice((8, 30, 64, 147)), 1, rng.choice((1, 1, 3))


def _few_filters(rng: random.Random) -> tuple[int, int, int, int]:
    wide, width = rng.choice((16, 32, 48, 64, 96, 160)), rng.choice((2, 3, 3, 3, 5))
    if rng.random() < 0.5:
        return wide, rng.choice((3, 8, 16, 24, 30, 32, 48, 64, 96, 100)), 1, width
    return rng.choice((16, 24, 32, 48, 64, 96, 120)), wide, 1, width


def _pointwise(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.choice((512, 1024, 1030)), rng.choice((8, 64, 147)), 1, 1


def _signals(rng: random.Random) -> tuple[int, int, int, int]:
    groups, width = rng.choice((1, 1, 2, 4)), rng.choice((16, 24, 32, 40, 48, 80))
    wide = groups * rng.choice((width, width, 8, 32, 56))
    return groups * width, wide, groups, rng.choice((2, 3, 7, 11, 16, 31))


def _patches(rng: random.Random) -> tuple[int, int, int, int]:
    return rng.choice((1, 3, 3, 8, 16)), rng.choice((8, 24, 64, 147)), 1, rng.choice((2, 4, 14, 16))


def _long_filters(rng: random.Random) -> tuple[int, int, int, int]:
    channels = rng.choice((32, 40, 64))
    return channels, channels, channels, rng.randint(300, 1100)


KINDS: dict[str, Callable[[random.Random], tuple[int, int, int, int]]] = {
    "depthwise": _depthwise,
    "grouped": _grouped,
    "narrow_groups": _narrow_groups,
    "few_channels": _few_channels,
    "dense": _dense,
    "few_filters": _few_filters,
    "pointwise": _pointwise,
    "signals": _signals,
    "patches": _patches,
    "long_filters": _long_filters,
}
"""Kind -> a function that draws (input channels, output channels, groups, width of the kernel).
Those of signals are of one row, as 1-d ones lie in channels_last."""

TAKES = {
    "adjoint": ("depthwise", "grouped", "narrow_groups", "signals"),
    "depthwise": ("depthwise",),
    "depthwise_1d": ("depthwise",),
    "depthwise_mma": ("depthwise",),
    "depthwise_planes": ("depthwise",),
    "depthwise_wgrad": ("depthwise",),
    "depthwise_wgrad_mma": ("depthwise", "long_filters"),
    "few_channels": (
        "depthwise",
        "few_channels",
        "dense",
        "few_filters",
        "pointwise",
        "patches",
        "signals",
    ),
    "few_channels_planes": (
        "depthwise",
        "few_channels",
        "dense",
        "few_filters",
        "pointwise",
        "signals",
    ),
    "few_filters": ("dense", "few_filters"),
    "fft": ("long_filters",),
    "few_channels_wgrad": (
        "depthwise",
        "few_channels",
        "dense",
        "few_filters",
        "patches",
        "signals",
    ),
    "grouped": ("grouped", "narrow_groups", "signals"),
    "grouped_wgrad": ("grouped", "narrow_groups", "signals"),
    "implicit_gemm_1d": ("grouped", "narrow_groups", "few_channels", "signals"),
    "implicit_gemm_1d_wgrad": ("grouped", "narrow_groups", "signals"),
    "channels_last": (
        "depthwise",
        "grouped",
        "narrow_groups",
        "few_channels",
        "dense",
        "few_filters",
        "pointwise",
        "patches",
        "signals",
    ),
    "filter_depths": ("depthwise", "grouped", "few_channels"),
    "pad_channels": ("depthwise", "few_channels", "dense", "few_filters", "pointwise", "patches"),
    "patches": ("patches",),
    "sliced_pointwise": ("pointwise",),
    "space_to_depth": ("few_channels", "dense", "patches"),
}
"""Implementation -> the kinds among whose problems are some that it computes, on GPUs of compute
capability 8.0 and later."""


def random_problem(rng: random.Random, kind: str) -> ConvProblem:
    """Draws a problem whose reference takes milliseconds.

    Images smaller than the kernel, padding that differs before and after, dilation, addresses that
    are hardly aligned, and each epilogue are among them, in a part of the cases each.
    """
    while True:
        channels, kernels, groups, width = KINDS[kind](rng)
        dims = rng.choice((1, 2, 2, 2, 2, 3))
        kernel = [width if rng.random() < 0.8 else rng.randint(1, width + 2) for _ in range(dims)]
        if dims == 1 and rng.random() < 0.5:
            kernel = [rng.choice((15, 31, 40))]
        sizes = [rng.randint(1, {1: 300, 2: 60, 3: 14}[dims]) for _ in range(dims)]
        if kind == "few_channels" and dims == 2 and rng.random() < 0.3:
            kernel[0], sizes = 1, [1, rng.randint(1, 300)]
        stride: int | list[int] = rng.choice((1, 1, 1, 2, 2, 3)) if rng.random() < 0.9 else width
        dilation = rng.choice((2, 3)) if rng.random() < 0.1 else 1
        before = [rng.randint(0, k // 2 * dilation + 1) for k in kernel]
        after = [
            rng.randint(0, k) if rng.random() < 0.2 else p
            for k, p in zip(kernel, before, strict=True)
        ]
        op = rng.choice(("fprop", "dgrad", "wgrad"))
        epilogue = {}
        if op == "fprop" and rng.random() < 0.5:
            epilogue = {
                "bias": rng.random() < 0.7,
                "residual": rng.random() < 0.3,
                "activation": rng.choice(tuple(FUNCTIONS)),
            }
        is_aligned = any(epilogue.values()) or rng.random() < 0.8
        alignment = (32, 32, 32) if is_aligned else tuple(rng.choice((4, 8, 16)) for _ in range(3))
        if kind == "patches":
            many = rng.randint(1, 3)
            sizes = [k * many + rng.choice((0, 0, k // 2)) * (many > 1) for k in kernel]
            stride, before, after, dilation = kernel, [0] * dims, [0] * dims, 1
        if kind == "signals":
            dims, kernel, sizes = 2, [1, width], [rng.randint(1, 2), rng.randint(1, 700)]
            stride = [1, rng.choice((1, 1, 2, 8))]
            before, after = [0, before[-1]], [0, after[-1]]
        if kind == "long_filters":
            dims, kernel, sizes, stride = 1, [width], [rng.randint(width // 2, 3000)], 1
            before, after = [rng.randint(0, width)], [rng.choice((0, width // 2, width - 1))]
        try:
            problem = ConvProblem(
                op,
                (rng.randint(1, 5), channels, *sizes),
                (kernels, channels // groups, *kernel),
                stride,
                (*before, *after),
                tuple(dilation if k > 1 else 1 for k in kernel),
                groups,
                rng.choice((torch.float16, torch.float16, torch.bfloat16, torch.float32)),
                CHANNELS_LAST.get(dims, torch.contiguous_format)
                if rng.random() < 0.7
                else torch.contiguous_format,
                rng.random() < 0.2,
                allow_tf32=rng.random() < 0.5,
                alignment=alignment,  # type: ignore[arg-type]
                **epilogue,  # type: ignore[arg-type]
            )
        except ValueError:  # the kernel does not fit into the image, or the like
            continue
        products = torch.Size(problem.output_shape).numel() * torch.Size(kernel).numel()
        most = (4 if kind == "long_filters" else 1) * _MOST_PRODUCTS
        if products * (channels // groups) <= most:
            return problem
