"""What the GPU does while a benchmark runs, read through NVML (nvidia-ml-py), never set.

`Telemetry` samples clock, power, temperature and throttle reasons on a thread of the parent
process, so that the measuring process is left alone. Without NVML every reading is None and
`Telemetry.reason` says why.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from types import TracebackType
from typing import Any

from cudnn_autotune.timers import telemetry
from cudnn_autotune.timers.telemetry import THROTTLE_REASONS

from . import numbers

# NVML_FI_DEV_POWER_INSTANT: nvmlDeviceGetPowerUsage averages over about a second from Ampere on.
POWER_INSTANT_FIELD = 186
COLUMNS = ("sm_clock_mhz", "power_w", "power_instant_w", "temperature_c")


def reason_names(bits: int) -> list[str]:
    return list(telemetry.reason_names(bits))


def visible_index(visible: str | None) -> int | str:
    """NVML's index (or UUID) of CUDA device 0, from CUDA_VISIBLE_DEVICES."""
    return telemetry.nvml_device(0, visible)


def decoded(text: Any) -> str | None:
    """Old releases of nvidia-ml-py return bytes."""
    return text.decode() if isinstance(text, bytes) else text


class Gpu:
    """Readings of one GPU. Every reading that the GPU does not offer is None."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._nvml: Any = None
        self._handle: Any = None
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            which = visible_index(os.environ.get("CUDA_VISIBLE_DEVICES"))
            if isinstance(which, int):
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(which)
            else:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(which)
        except Exception as error:  # NVML missing, no driver, no GPU: benchmarks still run
            self.reason = f"{type(error).__name__}: {error}"
            self._handle = None

    @property
    def available(self) -> bool:
        return self._handle is not None

    def read(self, function: str, *arguments: Any) -> Any:
        """`nvml.function(handle, *arguments)`, or None where it is not supported."""
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def _instant_power(self) -> float | None:
        values = self.read("nvmlDeviceGetFieldValues", [POWER_INSTANT_FIELD])
        if not values or getattr(values[0], "nvmlReturn", 1) != 0:
            return None
        return float(values[0].value.uiVal) / 1000

    def _reasons(self) -> int | None:
        for name in ("ClocksEventReasons", "ClocksThrottleReasons"):  # new and old name
            bits = self.read(f"nvmlDeviceGetCurrent{name}")
            if bits is not None:
                return int(bits)
        return None

    def snapshot(self) -> dict[str, Any]:
        """Clock (MHz), power (W), temperature (C) and throttle bits now."""
        nvml = self._nvml
        if self._handle is None:
            return {**dict.fromkeys(COLUMNS), "throttle_bits": None}
        milliwatts = self.read("nvmlDeviceGetPowerUsage")
        return {
            "sm_clock_mhz": self.read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "power_instant_w": self._instant_power(),
            "temperature_c": self.read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "throttle_bits": self._reasons(),
        }

    def fixed(self) -> dict[str, Any]:
        """Name, driver, the highest clocks and the power limit in force."""
        if self._handle is None:
            return {"nvml": self.reason}
        nvml = self._nvml
        text = self.read("nvmlDeviceGetName")
        driver = None
        with contextlib.suppress(nvml.NVMLError):
            driver = nvml.nvmlSystemGetDriverVersion()
        limit = self.read("nvmlDeviceGetEnforcedPowerLimit")
        return {
            "name": decoded(text),
            "driver": decoded(driver),
            "max_sm_clock_mhz": self.read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
            "max_memory_clock_mhz": self.read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
            "memory_clock_mhz": self.read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "power_limit_w": None if limit is None else limit / 1000,
        }


class Telemetry:
    """Samples a GPU every `period_s` between `__enter__` and `__exit__`.

    Times are `time.monotonic()`, one clock for all processes of a Linux machine, so a worker's
    times and these line up.
    """

    def __init__(self, gpu: Gpu | None = None, *, period_s: float = 0.02) -> None:
        self.gpu = gpu if gpu is not None else Gpu()
        self.period_s = period_s
        self.samples: list[tuple[float, dict[str, Any]]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Telemetry:
        self._sample()
        if self.gpu.available:
            self._thread = threading.Thread(target=self._loop, name="nvml", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._sample()

    def _sample(self) -> None:
        self.samples.append((time.monotonic(), self.gpu.snapshot()))

    def _loop(self) -> None:
        while not self._stop.wait(self.period_s):
            self._sample()

    def summary(self) -> dict[str, Any]:
        """First and last reading, the range of each quantity, share of samples per reason."""
        samples = [reading for _, reading in list(self.samples)]
        result: dict[str, Any] = {
            "samples": len(samples),
            "period_s": self.period_s,
            "nvml": "ok" if self.gpu.available else self.gpu.reason,
            "before": samples[0] if samples else None,
            "after": samples[-1] if samples else None,
        }
        for column in COLUMNS:
            values = [s[column] for s in samples if s[column] is not None]
            result[column] = (
                {"min": min(values), "median": numbers.median(values), "max": max(values)}
                if values
                else None
            )
        bits = [s["throttle_bits"] for s in samples if s["throttle_bits"] is not None]
        result["throttle_reasons"] = {
            name: numbers.significant(sum(1 for b in bits if b & bit) / len(bits), 3)
            for bit, name in THROTTLE_REASONS.items()
            if any(b & bit for b in bits)
        }
        return result

    def between(self, begin: float, end: float, *, at_most: int = 400) -> dict[str, list[Any]]:
        """Columns of the samples of [begin, end] (monotonic seconds), `t_s` since `begin`.

        Thinned to `at_most` samples, evenly: the record is a plot, not a log.
        """
        chosen = [(t, s) for t, s in list(self.samples) if begin <= t <= end]
        step = max(1, -(-len(chosen) // at_most))
        chosen = chosen[::step]
        columns: dict[str, list[Any]] = {"t_s": [round(t - begin, 3) for t, _ in chosen]}
        for column in (*COLUMNS, "throttle_bits"):
            columns[column] = [s[column] for _, s in chosen]
        return columns
