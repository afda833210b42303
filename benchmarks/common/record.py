"""A benchmark's record: one JSON file, replaced whole at every save, so that a timeout loses
nothing that was measured before it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .environment import environment

SCHEMA = 1


class Record:
    """The JSON record of one benchmark run.

    Args:
        benchmark: the script's name, without ".py".
        path: the file, or None to keep the record in memory only.
        device: "cuda" or "cpu". A cpu record is a dry run and never goes under results/.
        arguments: the options of the run.

    Raises:
        SystemExit: a cpu record under results/.
    """

    def __init__(
        self, benchmark: str, path: Path | None, *, device: str, arguments: dict[str, Any]
    ) -> None:
        self.path = path
        if device == "cpu" and path is not None and "results" in path.resolve().parts:
            sys.exit(f"{path}: a --device cpu run is a dry run and is not recorded under results/")
        self.data: dict[str, Any] = {
            "benchmark": benchmark,
            "schema": SCHEMA,
            "complete": False,
            "environment": environment(device),
            "arguments": {
                name: value.name if isinstance(value, Path) else value
                for name, value in sorted(arguments.items())
                if name != "worker"
            },
            "telemetry": None,
            "results": {},
        }

    @property
    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = self.data["results"]
        return results

    def save(self, *, complete: bool = False, telemetry: dict[str, Any] | None = None) -> None:
        """Writes the file anew, in one step."""
        self.data["complete"] = complete
        if telemetry is not None:
            self.data["telemetry"] = telemetry
        if self.path is None:
            return
        from cudnn_autotune.audit.record_file import json_lines
        from cudnn_autotune.core import atomic_file

        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(self.path, (json_lines(self.data) + "\n").encode())


def load(path: Path) -> dict[str, Any]:
    """Raises OSError, or ValueError where the file is not a record."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "environment" not in data:
        raise ValueError(f"{path}: not a benchmark record of schema {SCHEMA}")
    return data
