"""A plugin of pytest, which pytorch_tests loads: ``enable()`` for the whole session, in which a
GPU gets only the tests that use CUDA.

PYTORCH_SUITE holds, as JSON: ``device``, ``sampling``, ``benchmark_limit``, and ``counts``, the
folder in which each process writes a file: the numbers of tuned problems and of PyTorch's own
calls.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cudnn_autotune
from cudnn_autotune import _C

OPTIONS: dict[str, Any] = json.loads(os.environ["PYTORCH_SUITE"])


def pytest_configure(config: pytest.Config) -> None:
    cudnn_autotune.set_benchmark_limit(OPTIONS["benchmark_limit"])
    if OPTIONS["device"] == "cpu":
        _C.serve_process_wide("CPU")
    cudnn_autotune.enable(OPTIONS["sampling"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if OPTIONS["device"] == "cuda":
        others = [item for item in items if not uses_cuda(item.cls, item.function)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def uses_cuda(group: type | None, test: Callable[..., Any]) -> bool:
    """Whether a test is of a class that PyTorch made for CUDA, or says so itself."""
    if hasattr(group, "device_type"):
        return group.device_type == "cuda"
    return "cuda" in inspect.getsource(test).lower()


def pytest_sessionfinish(session: pytest.Session) -> None:
    counts = {
        "problems": len(cudnn_autotune.choices()),
        "fallbacks": cudnn_autotune.fallbacks(),
    }
    file = Path(OPTIONS["counts"], f"{os.getpid()}.json")
    file.write_text(json.dumps(counts), encoding="utf-8")
