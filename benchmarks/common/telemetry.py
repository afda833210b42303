"""Readings of the board in the form that records have them."""

from __future__ import annotations

from typing import Any

_RANGE = {"least": "min", "median": "median", "most": "max"}


def as_recorded(collected: dict[str, Any]) -> dict[str, Any]:
    """A summary of ``cudnn_autotune.timers.telemetry``, by the names that records use."""

    def ranged(quantity: str) -> dict[str, float] | None:
        values = collected[quantity]
        return {_RANGE[key]: value for key, value in values.items()} if values else None

    return {
        "samples": collected.get("readings"),
        "period_s": collected.get("period_s"),
        "nvml": collected.get("unavailable") or "ok",
        "sm_clock_mhz": ranged("clock_mhz"),
        "power_w": ranged("power_w"),
        "temperature_c": ranged("temperature_c"),
        "throttle_reasons": collected["throttle_reasons"],
    }
