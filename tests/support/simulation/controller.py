"""How a simulated board keeps its power at the cap: what clock its power controller allows."""

from __future__ import annotations

import math
import random
from typing import Protocol

from support.simulation.gpu import SimulatedGpu

_DAMPING = 0.4
"""The gain times the filter's time constant times the slope of the power over the logarithm of the
clock, at most: 0.25 would be critically damped."""


class Controller(Protocol):
    limit_mhz: float
    """The board may clock up to here."""

    def wake(self) -> None:
        """Load returns after the board had nothing to do."""

    def step(self, step_ms: float, power_w: float, filtered_w: float, clock_mhz: float) -> None:
        """``step_ms`` of time at this power and clock have passed."""


def controller(gpu: SimulatedGpu, rng: random.Random) -> Controller:
    """The one that ``gpu.control_every_ms`` asks for."""
    return Sampled(gpu, rng) if gpu.control_every_ms else Filtered(gpu)


class Filtered:
    """Follows the filtered power all the time.

    It integrates the relative distance from the cap, ``d ln(f) / dt = g * (1 - P_filtered /
    P_cap)``, slower upwards by ``gpu.recovery``.
    """

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._gain = _DAMPING / (gpu.power_filter_ms * gpu.power_exponent)
        self.limit_mhz = gpu.max_clock_mhz

    def wake(self) -> None:
        pass

    def step(self, step_ms: float, power_w: float, filtered_w: float, clock_mhz: float) -> None:
        room = 1 - filtered_w / self._gpu.power_limit_w
        gain = self._gain * (self._gpu.recovery if room > 0 else 1.0)
        limit = self.limit_mhz * math.exp(gain * room * step_ms)
        self.limit_mhz = min(self._gpu.max_clock_mhz, max(self._gpu.min_clock_mhz, limit))


class Sampled:
    """Looks at the mean power once in a while and moves the clock in one step.

    What an H200 of 700 W does: under heavy load it keeps its highest clock for 60 to 80 ms, then
    falls in one step to where the cap is met, give or take 1 to 2 %, and wavers about it from there
    on; another engine's steady clock is reached as fast, whether it lies above or below.
    """

    def __init__(self, gpu: SimulatedGpu, rng: random.Random) -> None:
        self._gpu = gpu
        self._rng = rng
        self.limit_mhz = gpu.max_clock_mhz
        self.wake()

    def wake(self) -> None:
        """The time without load says nothing of what comes: it starts looking anew."""
        self._since_ms = 0.0
        self._dynamic_j = 0.0
        self._clock_ms = 0.0

    def step(self, step_ms: float, power_w: float, filtered_w: float, clock_mhz: float) -> None:
        gpu = self._gpu
        self._since_ms += step_ms
        self._dynamic_j += (power_w - gpu.static_w) * step_ms / 1e3
        self._clock_ms += (clock_mhz / gpu.max_clock_mhz) ** gpu.power_exponent * step_ms
        if self._since_ms < gpu.control_every_ms:
            return
        # As P = P_static + D * (f / f_max) ** alpha, with the mean D of what ran.
        dynamic_w = 1e3 * self._dynamic_j / self._clock_ms
        limit = math.inf
        if dynamic_w > 0:
            room_w = gpu.power_limit_w - gpu.static_w
            limit = gpu.max_clock_mhz * (room_w / dynamic_w) ** (1 / gpu.power_exponent)
        limit *= math.exp(self._rng.gauss(0.0, gpu.noise.hunting_sd))
        self.limit_mhz = min(gpu.max_clock_mhz, max(gpu.min_clock_mhz, limit))
        self.wake()
