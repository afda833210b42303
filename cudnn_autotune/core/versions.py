"""The versions and the GPU, on which a measurement depends beside its problem."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from typing import Any

import torch

from cudnn_autotune.core.extension import _C, extension_available


@cache  # reading it takes a millisecond, and every decision has it
def version() -> str:
    return metadata.version("cudnn_autotune")


def environment(device: int | None = None) -> dict[str, Any]:
    """Returns versions and GPU as plain JSON values.

    Args:
        device: index of a CUDA device; None stands for the current one.

    Returns:
        The versions ``cudnn_autotune``, ``python``, ``torch``.
        The versions ``cuda``, ``cudnn`` and ``cudnn_frontend``: None with a CPU-only torch.
        ``gpu``, ``compute_capability``, ``multiprocessors``, ``memory_bytes``: None without a GPU.
        ``driver``: None if it cannot be read.
    """
    has_cudnn, has_gpu = extension_available(), torch.cuda.is_available()
    number = _C.cudnn_runtime_version() if has_cudnn else 0
    index = torch.cuda.current_device() if device is None and has_gpu else device
    gpu = torch.cuda.get_device_properties(index) if has_gpu else None
    return {
        "cudnn_autotune": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": f"{number // 10000}.{number // 100 % 100}.{number % 100}" if has_cudnn else None,
        "cudnn_frontend": _C.cudnn_frontend_version() if has_cudnn else None,
        "gpu": gpu.name if gpu else None,
        "compute_capability": f"{gpu.major}.{gpu.minor}" if gpu else None,
        "multiprocessors": gpu.multi_processor_count if gpu else None,
        "memory_bytes": gpu.total_memory if gpu else None,
        "driver": _driver() if gpu else None,
    }


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), None)
