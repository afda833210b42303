"""Readings of the board in the form that records have them."""

from __future__ import annotations

from typing import Any

from cudnn_autotune.timers import telemetry

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


class Telemetry(telemetry.Telemetry):
    """Reads the first GPU on a thread of its own, in a process that only waits."""

    def __init__(self, period_s: float = 0.1) -> None:
        super().__init__(telemetry.Gpu(), period_s)

    def summary(self) -> dict[str, Any]:
        return as_recorded(super().summary())
