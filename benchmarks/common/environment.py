"""The record that every result carries: which GPU, which versions, which code, which command."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

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
LIMITS = ("max_sm_clock_mhz", "max_memory_clock_mhz", "power_limit_w")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> tuple[str | None, bool | None]:
    """``(commit, whether files other than recorded results differ from it)``.

    The variables GIT_COMMIT and GIT_DIRTY (0 or 1) tell it on a machine that has no ``.git``.
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


def name_of(script: str) -> str:
    """The name of a script, or of the folder whose ``__main__.py`` it is."""
    path = Path(script)
    return path.parent.name if path.name == "__main__.py" else path.name


def command_line() -> str:
    """The command. Absolute paths are cut to their last part, because records are published."""
    shown = [f"benchmarks/{name_of(sys.argv[0])}"]
    for argument in sys.argv[1:]:
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


def environment(device: str) -> dict[str, Any]:
    """The environment record; ``device`` is "cuda" or "cpu"."""
    import torch

    from cudnn_autotune import environment as versions
    from cudnn_autotune.timers.telemetry import Board

    own, (head, dirty) = versions(), commit()
    is_gpu = device == "cuda"
    record: dict[str, Any] = {
        "device": device,
        "gpu": own["gpu"] if is_gpu else None,
        "driver": own["driver"] if is_gpu else None,
        "cuda": own["cuda"],
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cudnn_frontend": own["cudnn_frontend"],
        "torch": own["torch"],
        "python": own["python"],
        "package": own["cudnn_autotune"],
        "commit": head,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
    }
    if is_gpu:
        fixed = Board().fixed()
        record["driver"] = fixed["driver"] or own["driver"]
        record["clocks_and_limits"] = {
            key: round(fixed[key]) for key in LIMITS if fixed[key] is not None
        }
    return record


def missing(record: dict[str, Any]) -> list[str]:
    """What a record lacks to be published."""
    return [key for key in REQUIRED if record.get(key) in (None, "")]
