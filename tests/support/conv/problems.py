"""Convolutions that several test files ask about."""

from __future__ import annotations

from typing import Any

import torch

import cudnn_autotune as ca

OPS = ("fprop", "dgrad", "wgrad")
SHIPPED_GPUS = ("h200", "h100", "a100", "l4", "t4")

# A ResNet-50 layer, the layout and type that cuDNN offers most for.
RESNET_FP16: dict[str, Any] = {
    "input_shape": (64, 64, 56, 56),
    "weight_shape": (64, 64, 3, 3),
    "padding": 1,
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
}

# A weight of 36 MiB that most engines copy into another layout first; the results of fprop and
# dgrad are small beside it.
HUNGRY: dict[str, Any] = {
    "input_shape": (1, 1024, 8, 8),
    "weight_shape": (1024, 1024, 3, 3),
    "padding": 1,
    "dtype": torch.float32,
}
HEADROOM = 24 << 20  # bytes left to allocate for all but the result where memory is short

PROBLEMS: dict[str, dict[str, Any]] = {
    "resnet_fp16_nhwc": RESNET_FP16,
    "forum_fp32_nchw": {
        "input_shape": (64, 3, 224, 224),
        "weight_shape": (64, 3, 3, 3),
        "dtype": torch.float32,
    },
    "grouped_fp16": {
        "input_shape": (32, 64, 28, 28),
        "weight_shape": (64, 16, 3, 3),
        "padding": 1,
        "groups": 4,
        "dtype": torch.float16,
        "memory_format": torch.channels_last,
    },
    "strided_dilated_fp32": {
        "input_shape": (8, 32, 40, 36),
        "weight_shape": (48, 32, 3, 5),
        "stride": (2, 1),
        "padding": (2, 4),
        "dilation": (2, 2),
        "dtype": torch.float32,
    },
    "one_dimension": {
        "input_shape": (16, 32, 400),
        "weight_shape": (64, 32, 5),
        "padding": 2,
        "dtype": torch.float16,
    },
    "three_dimensions": {
        "input_shape": (2, 16, 12, 24, 24),
        "weight_shape": (32, 16, 3, 3, 3),
        "padding": 1,
        "dtype": torch.float16,
        "memory_format": torch.channels_last_3d,
    },
}


def make(name: str, op: str = "fprop", **changes: Any) -> ca.ConvProblem:
    return ca.ConvProblem(op=op, **{**PROBLEMS[name], **changes})
