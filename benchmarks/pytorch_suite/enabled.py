"""A plugin of pytest: ``enable()`` for the whole session. Loaded by pytorch_tests.py.

PYTORCH_SUITE holds, as JSON: ``device``, ``sampling``, ``benchmark_limit``, and ``counts``, the
folder in which each process writes a file: the numbers of tuned problems and of PyTorch's own
calls.
"""

from __future__ import annotations

import json
import os
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    counts = {
        "problems": len(cudnn_autotune.choices()),
        "fallbacks": cudnn_autotune.fallbacks(),
    }
    file = Path(OPTIONS["counts"], f"{os.getpid()}.json")
    file.write_text(json.dumps(counts), encoding="utf-8")
