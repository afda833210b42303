"""Readings of the board in the form that records have them."""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Any

from cudnn_autotune.timers import telemetry

_RANGE = {"least": "min", "median": "median", "most": "max"}


def as_recorded(told: dict[str, Any]) -> dict[str, Any]:
    """A summary of ``cudnn_autotune.timers.telemetry``, by the names that records use."""

    def ranged(quantity: str) -> dict[str, float] | None:
        values = told[quantity]
        return {_RANGE[key]: value for key, value in values.items()} if values else None

    return {
        "samples": told.get("readings"),
        "period_s": told.get("period_s"),
        "nvml": told.get("unavailable") or "ok",
        "sm_clock_mhz": ranged("clock_mhz"),
        "power_w": ranged("power_w"),
        "temperature_c": ranged("temperature_c"),
        "throttle_reasons": told["throttle_reasons"],
    }


class _Dated(telemetry.Gpu):
    """Notes when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.dated: list[tuple[float, telemetry.GpuState]] = []

    def state(self) -> telemetry.GpuState:
        state = super().state()
        self.dated.append((time.monotonic(), state))
        return state


class Telemetry(telemetry.Telemetry):
    """Reads the first GPU on a thread of its own, in a process that only waits."""

    def __init__(self, period_s: float = 0.1) -> None:
        self._board = _Dated()
        super().__init__(self._board, period_s)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.readings.append(self.gpu.state())

    def summary(self) -> dict[str, Any]:
        return as_recorded(super().summary())

    def medians(self, begin: float, end: float) -> dict[str, float | None]:
        """Median clock, power and temperature between two times of ``time.monotonic()``, which is
        one clock for all processes of a machine."""
        states = [state for seen, state in list(self._board.dated) if begin <= seen <= end]

        def median(quantity: str) -> float | None:
            values = [v for state in states if (v := getattr(state, quantity)) is not None]
            return statistics.median(values) if values else None

        return {
            "sm_clock_mhz": median("clock_mhz"),
            "power_w": median("power_w"),
            "temperature_c": median("temperature_c"),
        }
