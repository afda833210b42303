"""The versions and the GPU, on which a measurement depends beside its problem."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from cudnn_autotune.core.extension import _C, extension_available


def version() -> str:
    return metadata.version("cudnn_autotune")


def environment(device: int | None = None) -> dict[str, Any]:
    """Versions and GPU, as plain JSON values.

    Args:
        device: index of a CUDA device; None stands for the current one.

    Returns:
        The versions ``cudnn_autotune``, ``python``, ``torch``, ``cuda``, ``cudnn`` and
        ``cudnn_frontend``, of which the last three are None with a CPU-only torch; ``gpu``,
        ``compute_capability``, ``multiprocessors`` and ``memory_bytes``, which are None without a
        GPU; and ``driver``, which is None if it cannot be read.
    """
    found: dict[str, Any] = {
        "cudnn_autotune": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None,
        "cudnn_frontend": None,
        "gpu": None,
        "compute_capability": None,
        "multiprocessors": None,
        "memory_bytes": None,
        "driver": None,
    }
    if extension_available():
        number = _C.cudnn_runtime_version()
        found["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        found["cudnn_frontend"] = _C.cudnn_frontend_version()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(
            torch.cuda.current_device() if device is None else device
        )
        found["gpu"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
        found["driver"] = _driver()
    return found


def _driver() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((w for w in words if w[0].isdigit() and w.count(".") >= 1), None)
