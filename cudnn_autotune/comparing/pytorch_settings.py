"""PyTorch's settings that change a step's results or speed, for transfer to another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_OPERATORS = ("conv", "rnn", "matmul")


def read() -> dict[str, Any]:
    """Returns the settings of this process, as JSON."""
    settings = {
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precisions": _precisions(),
    }
    if hasattr(torch._C, "_get_cudnn_depthwise_kernel"):  # torch 2.14 and later
        settings["depthwise_kernel"] = torch.backends.cudnn.depthwise_kernel
    return settings


def write(settings: dict[str, Any]) -> None:
    """Applies a result of :func:`read`, with the same torch."""
    torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    _set_precisions(settings["precisions"])
    if "depthwise_kernel" in settings:
        torch.backends.cudnn.depthwise_kernel = settings["depthwise_kernel"]


@contextmanager
def nothing_rounded() -> Iterator[None]:
    """Forbids rounding of float32 operands, as to TF32, within the context."""
    before = _precisions()
    try:
        _set_precisions(_exact(before))
        yield
    finally:
        _set_precisions(before)


def _precisions() -> dict[str, Any]:
    """Returns where float32 operands may be rounded: by the settings' older names, and by operator.
    PyTorch may refuse to read an older name if the newer ones have more detail: then it is None."""

    def older(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return {
        "allow_tf32": older(lambda: torch.backends.cudnn.allow_tf32),
        "matmul": older(torch.get_float32_matmul_precision),
        # Through torch._C: torch.backends refuses where the caller has used both interfaces.
        "by_operator": {op: torch._C._get_fp32_precision_getter("cuda", op) for op in _OPERATORS},
    }


def _exact(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of :func:`_precisions` without rounding, by the names of ``given``."""
    by_operator = {
        op: precision if precision in ("none", "ieee") else "ieee"
        for op, precision in given["by_operator"].items()
    }
    older = given["allow_tf32"] is not None, given["matmul"] is not None
    return {
        "allow_tf32": False if older[0] else None,
        "matmul": "highest" if older[1] else None,
        "by_operator": {
            op: precision
            for op, precision in by_operator.items()
            if not older[op == "matmul"]  # an older name sets its operators
        },
    }


def _set_precisions(wanted: dict[str, Any]) -> None:
    if wanted["allow_tf32"] is not None:
        torch.backends.cudnn.allow_tf32 = wanted["allow_tf32"]
    if wanted["matmul"] is not None:
        torch.set_float32_matmul_precision(wanted["matmul"])
    for op, precision in wanted["by_operator"].items():
        if torch._C._get_fp32_precision_getter("cuda", op) != precision:
            torch._C._set_fp32_precision_setter("cuda", op, precision)
