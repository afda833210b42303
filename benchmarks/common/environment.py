"""The record that every result carries: which GPU, which versions, which code, which command."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from .telemetry import Gpu

ROOT = Path(__file__).resolve().parents[2]

# A figure without these says nothing; render_results.py refuses it.
REQUIRED = (
    "gpu",
    "driver",
    "cuda",
    "cudnn",
    "cudnn_frontend",
    "torch",
    "python",
    "package",
    "commit",
    "date",
    "command",
)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> tuple[str | None, bool | None]:
    """(commit, whether files other than recorded results differ from it).

    GIT_COMMIT and GIT_DIRTY (0 or 1) override, for a machine that has a copy without .git.
    """
    given = os.environ.get("GIT_COMMIT")
    if given:
        dirty = os.environ.get("GIT_DIRTY")
        return given, None if dirty is None else dirty not in ("", "0", "false")
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None, None
    status = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return head, None if status is None else bool(status)


def command_line(arguments: list[str] | None = None) -> str:
    """The command, with absolute paths cut to their last part: records are published."""
    shown = [f"benchmarks/{Path(sys.argv[0]).name}"]
    for argument in arguments or sys.argv[1:]:
        option, equals, value = argument.rpartition("=")  # --json=/folder/x.json as well
        shown.append(option + equals + (Path(value).name if os.path.isabs(value) else value))
    return " ".join(shown)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment(device: str, arguments: list[str] | None = None) -> dict[str, Any]:
    """The environment record. `device` is "cuda" or "cpu"; nothing here starts a CUDA context."""
    torch = importlib.import_module("torch")
    head, dirty = commit()
    record: dict[str, Any] = {
        "device": device,
        "gpu": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cudnn_frontend": None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "package": None,
        "commit": head,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(arguments),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
    }
    if device == "cuda":
        fixed = Gpu().fixed()
        record["gpu"] = fixed.get("name")
        record["driver"] = fixed.get("driver")
        record["clocks_and_limits"] = {
            k: v for k, v in fixed.items() if k not in ("name", "driver")
        }
    # The package asks CUDA and cuDNN themselves: it fills what NVML could not say.
    own = importlib.import_module("cudnn_autotune").environment()
    record["cudnn_frontend"] = own["cudnn_frontend"]
    record["package"] = own["cudnn_autotune"]
    if device == "cuda":
        for key in ("gpu", "driver"):
            record[key] = record[key] or own[key]
    return record


def missing(record: dict[str, Any]) -> list[str]:
    """What a record lacks to be published."""
    return [key for key in REQUIRED if record.get(key) in (None, "")]
