"""A record of the package's audit, as render_results.py reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .environment import LIMITS
from .telemetry import as_recorded


def is_audit(path: Path) -> bool:
    """Raises OSError or ValueError where the file cannot be read as JSON."""
    tree = json.loads(path.read_text())
    return isinstance(tree, dict) and "format" in tree


def load(path: Path) -> dict[str, Any]:
    """``audit`` is the record itself; the rest is what every benchmark's record has.

    Raises:
        ValueError: the file is not an audit's record.
    """
    from cudnn_autotune.audit import record_file

    record = record_file.load(path)
    return {
        "benchmark": "audit_layers",
        "complete": record.complete,
        "environment": _environment(record.kind, record.environment),
        "telemetry": as_recorded(record.telemetry) if record.telemetry else None,
        "earlier": [_environment(record.kind, past["environment"]) for past in record.sessions],
        "audit": record,
    }


def _environment(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    found = dict(given)
    if kind != "gpu":
        found["device"] = "cpu"  # whatever GPU a recording is of
    if found.get("cudnn"):
        major, minor, patch = (int(part) for part in found["cudnn"].split("."))
        found["cudnn"] = major * 10000 + minor * 100 + patch
    found["clocks_and_limits"] = {
        key: round(found[key]) for key in LIMITS if found.get(key) is not None
    }
    return found


def tables(data: dict[str, Any]) -> list[Any]:
    from cudnn_autotune.audit import report

    found = report.tables(data["audit"])
    if data["earlier"]:
        commits = dict.fromkeys(past["commit"][:10] for past in data["earlier"])
        sessions = f"{len(data['earlier'])} sessions of commit {', '.join(commits)}"
        found[0].note += f" Continues {sessions}."
    return found


def plot(data: dict[str, Any], path: Path) -> None:
    from cudnn_autotune.audit import plot as audit_plot

    audit_plot.plot(data["audit"], path)
