"""A benchmark's record: one JSON file, replaced whole at every save, so that a timeout loses
nothing that was measured before it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .environment import environment

SCHEMA = 1
# Options that a script passes to its own processes.
_OF_WORKERS = ("worker", "rank_request")


class Record:
    """The JSON record of one benchmark run. While it is entered, the GPU's state is read.

    Args:
        benchmark: the script's name, without ".py".
        options: of the run. ``json`` is the file, or None to keep the record in memory only;
            ``device`` "cpu" makes it a dry run, which never goes under results/.

    Raises:
        SystemExit: a dry run under results/.
    """

    def __init__(self, benchmark: str, options: argparse.Namespace) -> None:
        from cudnn_autotune.timers import telemetry

        self.path: Path | None = options.json
        given, device = vars(options), getattr(options, "device", "cuda")
        if device == "cpu" and self.path is not None and "results" in self.path.resolve().parts:
            text = "a --device cpu run is a dry run and is not recorded under results/"
            sys.exit(f"{self.path}: {text}")
        self._telemetry = telemetry.Telemetry(telemetry.Board())
        self.data: dict[str, Any] = {
            "benchmark": benchmark,
            "schema": SCHEMA,
            "complete": False,
            "environment": environment(device),
            "arguments": {
                name: value.name if isinstance(value, Path) else value
                for name, value in sorted(given.items())
                if name not in _OF_WORKERS
            },
            "telemetry": None,
            "results": {},
        }

    def __enter__(self) -> Record:
        self._telemetry.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._telemetry.__exit__(*raised)

    @property
    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = self.data["results"]
        return results

    def list_of(self, name: str) -> list[Any]:
        """The list of results of this name; a new one is empty."""
        found: list[Any] = self.results.setdefault(name, [])
        return found

    def save(self) -> None:
        """Writes the file anew, in one step."""
        from .telemetry import as_recorded

        self.data["telemetry"] = as_recorded(self._telemetry.summary())
        if self.path is None:
            return
        from cudnn_autotune.audit.record_file import json_lines
        from cudnn_autotune.core import atomic_file

        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(self.path, (json_lines(self.data) + "\n").encode())

    def end(self, complete: bool, tables: Callable[[dict[str, Any]], Iterable[Any]]) -> int:
        """Saves and shows it; returns the script's exit status, 0 where it is complete."""
        from .tables import show

        self.data["complete"] = complete
        self.save()
        show(tables(self.data))
        return 0 if complete else 1


def load(path: Path) -> dict[str, Any]:
    """Raises OSError, or ValueError where the file is not a record."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "environment" not in data:
        raise ValueError(f"{path}: not a benchmark record of schema {SCHEMA}")
    return data
