"""A GPU's state, read through NVML (the package nvidia-ml-py). No setting is changed.

A reading is None without NVML, and if the GPU or the driver does not offer the quantity.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h, nvmlClocksEventReasons).
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT (nvml.h)
_QUANTITIES = ("clock_mhz", "power_w", "temperature_c")


def reason_names(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def nvml_device(cuda_index: int, visible: str | None) -> int | str:
    """Returns NVML's index, or the UUID, of a CUDA device, given ``CUDA_VISIBLE_DEVICES``."""
    shown = [part.strip() for part in (visible or "").split(",") if part.strip()]
    if cuda_index >= len(shown):
        return cuda_index
    name = shown[cuda_index]
    return int(name) if name.isdigit() else name


@dataclass(frozen=True)
class GpuState:
    """A reading of the board. An unknown quantity is None, or empty."""

    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    reports_throttling: bool = False
    """Whether ``throttle_reasons`` is known to be complete."""


class Board:
    """The board of a GPU as NVML knows it. No method raises an error.

    Args:
        cuda_index: index of the CUDA device. NVML numbers GPUs by their PCI bus. Among unlike GPUs
            the index is right only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """

    def __init__(self, cuda_index: int = 0) -> None:
        self.unavailable: str | None = None
        """The reason why there are no readings; None if there are."""
        self._nvml: Any = None
        self._handle: Any = None
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            device = nvml_device(cuda_index, os.environ.get("CUDA_VISIBLE_DEVICES"))
            by = "Index" if isinstance(device, int) else "UUID"
            self._handle = getattr(self._nvml, f"nvmlDeviceGetHandleBy{by}")(device)
        except Exception as error:  # no nvidia-ml-py, no driver, no such GPU
            self.unavailable = f"{type(error).__name__}: {error}"
        self._max_clock_mhz = self._number("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM")

    @classmethod
    @functools.cache
    def of(cls, cuda_index: int) -> Board:
        """Returns the process's only reader of a device, since opening one takes milliseconds."""
        return cls(cuda_index)

    def state(self) -> GpuState:
        """Reads the board."""
        reasons = self._throttle_reasons()
        return GpuState(
            power_w=_thousandth(self._number("nvmlDeviceGetPowerUsage")),
            power_limit_w=_thousandth(self._number("nvmlDeviceGetEnforcedPowerLimit")),
            temperature_c=self._number("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
            clock_mhz=self._number("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            max_clock_mhz=self._max_clock_mhz,
            throttle_reasons=reasons or (),
            reports_throttling=reasons is not None,
        )

    def _throttle_reasons(self) -> tuple[str, ...] | None:
        bits = self._number("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # the function's name before driver 535
            bits = self._number("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else reason_names(int(bits))

    def instant_power_w(self) -> float | None:
        """Returns the newest reading of instant power; :meth:`state` has the mean of a second."""
        if self._handle is None:
            return None
        try:
            (value,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [_POWER_INSTANT])
        except (self._nvml.NVMLError, AttributeError, TypeError):
            return None
        has_value = value.nvmlReturn == self._nvml.NVML_SUCCESS
        return value.value.uiVal / 1000 if has_value and value.value.uiVal > 0 else None

    def is_power_capped(self) -> bool:
        """Returns whether the power limit holds the clock now."""
        return "sw_power_cap" in (self._throttle_reasons() or ())

    def fixed(self) -> dict[str, Any]:
        """Returns name, driver, the highest clocks and the power limit in force."""
        return {
            "gpu": self._text("nvmlDeviceGetName", self._handle),
            "driver": self._text("nvmlSystemGetDriverVersion"),
            "max_sm_clock_mhz": self._max_clock_mhz,
            "max_memory_clock_mhz": self._number("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
            "power_limit_w": _thousandth(self._number("nvmlDeviceGetEnforcedPowerLimit")),
        }

    def _number(self, function: str, *constants: str) -> float | None:
        if self._handle is None:
            return None
        try:
            arguments = [getattr(self._nvml, name) for name in constants]
            return float(getattr(self._nvml, function)(self._handle, *arguments))
        except (self._nvml.NVMLError, AttributeError, TypeError):
            return None

    def _text(self, function: str, *arguments: Any) -> str | None:
        if self._handle is None:
            return None
        try:
            text = getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None
        return text.decode() if isinstance(text, bytes) else str(text)


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


class _Background:
    """A thread that reads a GPU until ``__exit__``."""

    def __init__(self, gpu: Board, period_s: float) -> None:
        self.gpu = gpu
        self.period_s = period_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _start(self, name: str, loop: Callable[..., None], *arguments: object) -> None:
        self._thread = threading.Thread(target=loop, args=arguments, name=name, daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)


class Telemetry(_Background):
    """A background thread that reads a GPU every ``period_s`` seconds.

    It is for a process that only waits, so that it does not disturb the measured work.
    """

    def __init__(self, gpu: Board, period_s: float = 0.1) -> None:
        super().__init__(gpu, period_s)
        self.readings: list[GpuState] = []

    def __enter__(self) -> Telemetry:
        self.readings.append(self.gpu.state())
        self._start("telemetry", self._loop)
        return self

    def _loop(self) -> None:
        while not self._stop.wait(self.period_s):
            self.readings.append(self.gpu.state())

    def summary(self) -> dict[str, Any]:
        """Returns the range of each quantity and the share of readings with each throttle reason.

        ``{"readings", "period_s", "clock_mhz": {"least", "median", "most"} or None, "power_w",
        "temperature_c", "throttle_reasons": {name: share}, "unavailable"}``.
        """
        readings = list(self.readings)
        found: dict[str, Any] = {
            "readings": len(readings),
            "period_s": self.period_s,
            "unavailable": self.gpu.unavailable,
        }
        for quantity in _QUANTITIES:
            values = [v for r in readings if (v := getattr(r, quantity)) is not None]
            found[quantity] = _range(values) if values else None
        seen = [r.throttle_reasons for r in readings]
        names = dict.fromkeys(name for reasons in seen for name in reasons)
        found["throttle_reasons"] = {
            name: round(sum(name in reasons for reasons in seen) / len(seen), 3) for name in names
        }
        return found


@dataclass(frozen=True)
class PowerReading:
    """A new reading of instant power."""

    seen_s: float
    """The time of ``time.perf_counter()`` at which the reading first appeared."""
    power_w: float
    is_capped: bool
    """Whether the power limit held the clock then."""


class PowerWatch(_Background):
    """A background thread that collects each new reading of a GPU's instant power, with a query
    every ``period_s`` seconds. There is no thread if the GPU has no such readings.

    A query takes some ten microseconds; an H200 has a new reading every 100 ms.
    """

    def __init__(self, gpu: Board, period_s: float = 0.001) -> None:
        super().__init__(gpu, period_s)
        self.readings: list[PowerReading] = []

    def __enter__(self) -> PowerWatch:
        known = self.gpu.instant_power_w()  # a reading from before the watch began
        if known is not None:
            self._start("power", self._loop, known)
        return self

    def _loop(self, known: float) -> None:
        while not self._stop.wait(self.period_s):
            power_w = self.gpu.instant_power_w()
            if power_w is not None and power_w != known:
                seen_s = time.perf_counter()
                self.readings.append(PowerReading(seen_s, power_w, self.gpu.is_power_capped()))
                known = power_w


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "median": float(np.median(values)), "most": max(values)}
