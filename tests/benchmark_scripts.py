"""The scripts under benchmarks/, as processes of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from subprocesses import python

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, *arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return python(str(BENCHMARKS / f"{script}.py"), *map(str, arguments), **more)


def record(folder: Path, script: str) -> dict[str, Any]:
    """What ``script`` wrote into ``folder``."""
    data: dict[str, Any] = json.loads((folder / f"{script}.json").read_text())
    return data
