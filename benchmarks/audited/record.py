"""A record of the package's audit in the shape that render_results.py reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The audit's names for a reading's range, and ours.
_RANGE = {"least": "min", "median": "median", "most": "max"}
_LIMITS = ("max_sm_clock_mhz", "max_memory_clock_mhz", "power_limit_w")


def is_audit(path: Path) -> bool:
    """Raises OSError or ValueError where the file cannot be read as JSON."""
    tree = json.loads(path.read_text())
    return isinstance(tree, dict) and "format" in tree


def load(path: Path) -> dict[str, Any]:
    """``audit`` is the record itself; the rest is what every benchmark's record has.

    Raises:
        ValueError: not an audit's record.
    """
    from cudnn_autotune.audit import record_file

    record = record_file.load(path)
    return {
        "benchmark": "audit_layers",
        "complete": record.complete,
        "environment": _environment(record.kind, record.environment),
        "telemetry": _telemetry(record.telemetry),
        "earlier_sessions": [
            {
                "environment": _environment(record.kind, session["environment"]),
                "telemetry": _telemetry(session["telemetry"]),
            }
            for session in record.sessions
        ],
        "audit": record,
    }


def _environment(kind: str, told: dict[str, Any]) -> dict[str, Any]:
    found = dict(told)
    if kind != "gpu":
        found["device"] = "cpu"  # whatever GPU a recording is of
    if found.get("cudnn"):
        major, minor, patch = (int(part) for part in found["cudnn"].split("."))
        found["cudnn"] = major * 10000 + minor * 100 + patch
    found["clocks_and_limits"] = {
        key: round(found[key]) for key in _LIMITS if found.get(key) is not None
    }
    return found


def _telemetry(told: dict[str, Any] | None) -> dict[str, Any] | None:
    if not told:
        return None

    def ranged(quantity: str) -> dict[str, float] | None:
        values = told[quantity]
        return {_RANGE[key]: value for key, value in values.items()} if values else None

    return {
        "sm_clock_mhz": ranged("clock_mhz"),
        "power_w": ranged("power_w"),
        "temperature_c": ranged("temperature_c"),
        "throttle_reasons": told["throttle_reasons"],
    }
