"""A problem, and changes of one field each, every element of the tuples included."""

from __future__ import annotations

from typing import Any

import torch

BASE: dict[str, Any] = {
    "op": "fprop",
    "input_shape": (2, 8, 10, 12),
    "weight_shape": (8, 8, 3, 3),
    "stride": (1, 1),
    "padding": (1, 1, 1, 1),
    "dilation": (1, 1),
    "groups": 1,
    "dtype": torch.float32,
    "memory_format": torch.contiguous_format,
    "deterministic": False,
    "allow_tf32": True,
    "allow_reduced_precision": True,
    "alignment": (32, 32, 32),
    "bias": False,
    "residual": False,
    "activation": "",
}

CHANGES: list[dict[str, Any]] = [
    {"op": "dgrad"},
    {"op": "wgrad"},
    {"input_shape": (3, 8, 10, 12)},
    {"input_shape": (2, 8, 11, 12)},
    {"input_shape": (2, 8, 10, 13)},
    {"input_shape": (2, 8, 12, 10)},
    {"input_shape": (2, 16, 10, 12), "weight_shape": (8, 16, 3, 3)},
    {"weight_shape": (16, 8, 3, 3)},
    {"weight_shape": (8, 8, 2, 3)},
    {"weight_shape": (8, 8, 3, 2)},
    {"stride": (2, 1)},
    {"stride": (1, 2)},
    {"padding": (2, 1, 1, 1)},
    {"padding": (1, 2, 1, 1)},
    {"padding": (1, 1, 2, 1)},
    {"padding": (1, 1, 1, 2)},
    {"dilation": (2, 1)},
    {"dilation": (1, 2)},
    {"groups": 2, "weight_shape": (8, 4, 3, 3)},
    {"groups": 4, "weight_shape": (8, 2, 3, 3)},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
    {"memory_format": torch.channels_last},
    {"deterministic": True},
    {"allow_tf32": False},
    {"allow_reduced_precision": False, "dtype": torch.float16},
    {"bias": True},
    {"residual": True},
    {"bias": True, "residual": True},
    {"activation": "relu"},
    {"activation": "gelu"},
    {"alignment": (16, 32, 32)},
    {"alignment": (32, 16, 32)},
    {"alignment": (32, 32, 16)},
    {"input_shape": (2, 8, 120), "weight_shape": (8, 8, 3), "stride": 1, "padding": 1,
     "dilation": 1},
    {"input_shape": (2, 8, 1, 10, 12), "weight_shape": (8, 8, 1, 3, 3), "stride": 1,
     "padding": (0, 1, 1), "dilation": 1},
]  # fmt: skip
