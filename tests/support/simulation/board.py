"""The moving parts of a simulated GPU: virtual time, clock, power, noise."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from cudnn_autotune.timers.board_power import LATE_S, WINDOW_S
from cudnn_autotune.timers.telemetry import PowerReading
from cudnn_autotune.timers.timer import Cache, GpuState
from support.simulation.controller import controller
from support.simulation.gpu import SimulatedEngine, SimulatedGpu, power_w

_STEP_MS = 4.0
_RAMP_STEP_MS = 0.5
_RESTED_MS = 10.0
"""Idle for longer than between two runs of a strategy, the board has rested."""


@dataclass(frozen=True)
class Ran:
    """What a batch did."""

    elapsed_ms: float
    clock_mhz: float
    """Mean over the batch."""


class Board:
    """One GPU with its host's clock.

    Time goes in steps of at most some ms, so that a long batch costs little.
    """

    def __init__(self, gpu: SimulatedGpu, rng: random.Random) -> None:
        self.gpu = gpu
        self._rng = rng
        self.now_ms = 0.0
        self._controller = controller(gpu, rng)
        self._ramp_mhz = gpu.idle_clock_mhz  # how far the board has woken up
        self._idle_ms = 0.0
        self._filtered_w = gpu.idle_w
        self._drawn: deque[tuple[float, float]] = deque()
        """Steps of the last moments: their length and power."""
        self.readings: list[PowerReading] = []
        """Of the power, by the board's own time."""
        self._temperature_c = gpu.idle_temperature_c
        self._drift = rng.gauss(0.0, gpu.noise.drift_sd)
        self._tenant = False
        self._tenant_until_ms = rng.expovariate(1 / gpu.noise.tenant_every_ms)

    @property
    def clock_mhz(self) -> float:
        return min(self._controller.limit_mhz, self._ramp_mhz)

    def run(
        self, engine: SimulatedEngine, calls: int, cache: Cache, load_ms: float, lone: bool
    ) -> Ran:
        """``calls`` of ``engine``, after ``load_ms`` of loading its kernel.

        ``lone``: a single launch that the host waits for, not part of a filled queue.
        """
        noise, gpu = self.gpu.noise, self.gpu
        if load_ms:
            self._awake(load_ms, gpu.static_w)
        start_ms = self.now_ms
        jitter = self._rng.gauss(0.0, noise.batch_sd)
        jitter += self._rng.gauss(0.0, noise.call_sd / math.sqrt(calls))
        gap_ms = (gpu.lone_launch_us if lone else gpu.launch_gap_us) / 1e3
        clock_ms = 0.0
        running_ms = 0.0
        left = float(calls)
        while left > 1e-9:
            clock_mhz = self.clock_mhz
            clock = clock_mhz / gpu.max_clock_mhz
            busy_ms = engine.at(clock, cache) * math.exp(jitter + self._drift)
            call_ms = busy_ms + gap_ms
            power = power_w(gpu, engine.dynamic_w, clock, busy_ms / call_ms)
            if self._tenant:  # the other process draws as much meanwhile
                call_ms /= 1 - noise.tenant_share
            waking = self._ramp_mhz < gpu.max_clock_mhz
            step_ms = min(left * call_ms, _RAMP_STEP_MS if waking else _STEP_MS)
            self._awake(step_ms, power)
            clock_ms += clock_mhz * step_ms
            running_ms += step_ms
            left -= step_ms / call_ms
        if noise.spike_every_ms and self._rng.random() < -math.expm1(
            -running_ms / noise.spike_every_ms
        ):
            self._awake(self._rng.expovariate(1 / noise.spike_ms), gpu.static_w)
        tick_ms = gpu.event_us / 1e3
        ticks = max(1, round((self.now_ms - start_ms) / tick_ms))
        return Ran(ticks * tick_ms, clock_ms / running_ms)

    def idle(self, duration_ms: float) -> None:
        """The host is busy, the GPU is not."""
        gpu = self.gpu
        left_ms = duration_ms
        while left_ms > 0:
            asleep = self._idle_ms >= gpu.idle_after_ms
            if asleep:
                self._ramp_mhz = gpu.idle_clock_mhz
            step_ms = min(left_ms, _STEP_MS)
            self._pass(step_ms, gpu.idle_w if asleep else gpu.static_w)
            self._idle_ms += step_ms
            left_ms -= step_ms

    def state(self) -> GpuState:
        gpu = self.gpu
        idle = self._ramp_mhz <= gpu.idle_clock_mhz
        reasons = []
        if idle:
            reasons.append("gpu_idle")
        elif self._is_capped:
            reasons.append("sw_power_cap")
        return GpuState(
            power_w=self._filtered_w,
            power_limit_w=gpu.power_limit_w,
            temperature_c=self._temperature_c,
            clock_mhz=self.clock_mhz,
            max_clock_mhz=gpu.max_clock_mhz,
            throttle_reasons=tuple(reasons),
            reports_throttling=True,
        )

    @property
    def _is_capped(self) -> bool:
        return self._controller.limit_mhz < 0.995 * self.gpu.max_clock_mhz

    def _awake(self, step_ms: float, power: float) -> None:
        gpu = self.gpu
        if self._idle_ms >= _RESTED_MS:
            self._controller.wake()
        self._idle_ms = 0.0
        rise = (gpu.max_clock_mhz - gpu.idle_clock_mhz) / gpu.ramp_ms
        self._ramp_mhz = min(gpu.max_clock_mhz, self._ramp_mhz + rise * step_ms)
        self._pass(step_ms, power)

    def _pass(self, step_ms: float, power: float) -> None:
        gpu, noise = self.gpu, self.gpu.noise
        self.now_ms += step_ms
        if gpu.power_reading_every_ms:
            self._read(step_ms, power)
        seen = -math.expm1(-step_ms / gpu.power_filter_ms)
        self._filtered_w += (power - self._filtered_w) * seen
        self._controller.step(step_ms, power, self._filtered_w, self.clock_mhz)
        target_c = gpu.idle_temperature_c + gpu.heating_c_per_w * (power - gpu.idle_w)
        self._temperature_c += (target_c - self._temperature_c) * min(1, step_ms / gpu.heating_ms)
        if noise.drift_sd:
            kept = math.exp(-step_ms / noise.drift_ms)
            self._drift *= kept
            self._drift += self._rng.gauss(0.0, noise.drift_sd * math.sqrt(1 - kept * kept))
        if noise.tenant_share:
            while self.now_ms >= self._tenant_until_ms:
                self._tenant = not self._tenant
                mean_ms = noise.tenant_for_ms if self._tenant else noise.tenant_every_ms
                self._tenant_until_ms += self._rng.expovariate(1 / mean_ms)

    def _read(self, step_ms: float, power: float) -> None:
        """Once in a while, the mean of a window that ended a moment ago."""
        window_ms = 1e3 * WINDOW_S
        self._drawn.append((step_ms, power))
        while sum(step for step, _ in self._drawn) - self._drawn[0][0] > window_ms:
            self._drawn.popleft()
        every_ms = self.gpu.power_reading_every_ms
        if self.now_ms // every_ms > (self.now_ms - step_ms) // every_ms:
            steps, powers = zip(*self._drawn, strict=True)
            power_w = float(np.average(powers, weights=steps))
            power_w *= math.exp(self._rng.gauss(0.0, self.gpu.noise.reading_sd))
            seen_s = self.now_ms / 1e3 + LATE_S
            self.readings.append(PowerReading(seen_s, power_w, self._is_capped))
