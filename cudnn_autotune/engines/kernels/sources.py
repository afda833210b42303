"""The CUDA sources of the kernels, as NVRTC takes them."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources

import torch

from cudnn_autotune.engines.problem import ACTIVATIONS

ELEMENTS = {torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float"}
"""The name of each dtype in device.cuh."""
ACTIVATION_NUMBERS = {name: number for number, name in enumerate(("", *ACTIVATIONS))}
"""The number of each activation in device.cuh."""
_VERSION_DIGITS = 8


@functools.cache
def source(file_name: str) -> str:
    """Returns a source of this folder with device.cuh before it; it includes nothing."""
    return text("device.cuh") + text(file_name)


@functools.cache
def text(file_name: str, package: str = __package__) -> str:
    """Returns a file of a package's folder."""
    return (resources.files(package) / file_name).read_text(encoding="utf-8")


@functools.cache
def version(*parts: str) -> str:
    """Returns a digest of texts, such as a kernel's source and that of its launch: the version of
    an implementation changes whenever they do."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_VERSION_DIGITS]
