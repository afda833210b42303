"""What a simulated GPU is: its board, its noise, its engines; and their exact times.

A call of an engine takes ``t(f) = t_max * ((1 - s) + s * f_max / f)`` at clock ``f``, with ``s``
its clock sensitivity, and the board then draws ``P(f) = P_static + D * (f / f_max) ** alpha``.
Under a cap the clock settles where ``P(f)`` is the cap, so that for ``s = 1`` the steady time is
``max(t_max, E / P_cap)`` with ``E`` the energy of a call at that clock: who needs less energy wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Cache


def _check(owner: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not least <= value < float("inf"):
            raise ValueError(f"{name} must be finite and at least {least:g}, got {value!r}")


@dataclass(frozen=True)
class Noise:
    """What makes two measurements of one thing differ. The default is a quiet machine."""

    call_sd: float = 0.01
    """Standard deviation of the logarithm of a call's time, independent from call to call."""
    batch_sd: float = 0.002
    """The same, shared by the calls of a batch."""
    drift_sd: float = 0.0
    """Standard deviation of the slow drift of the log times that all engines share."""
    drift_ms: float = 2000.0
    """The time over which the drift forgets its value (an Ornstein-Uhlenbeck process)."""
    spike_every_ms: float = 0.0
    """Mean GPU time between two spikes; 0: none."""
    spike_ms: float = 0.3
    """Mean length of a spike (exponential)."""
    tenant_share: float = 0.0
    """Share of the GPU that another process takes while it is active; below 1."""
    tenant_every_ms: float = 1000.0
    """Mean time between the end of its activity and the next (exponential)."""
    tenant_for_ms: float = 50.0
    """Mean length of its activity (exponential)."""
    hunting_sd: float = 0.0
    """Standard deviation of the logarithm of the clock around the one that meets the cap, look by
    look of the power controller; without effect where ``control_every_ms`` is 0."""
    reading_sd: float = 0.0
    """Standard deviation of the logarithm of a reading of the power."""

    def __post_init__(self) -> None:
        _check(self, 0.0, *(f.name for f in fields(self)))
        if self.tenant_share >= 1:
            raise ValueError(f"tenant_share must be below 1, got {self.tenant_share!r}")
        if min(self.drift_ms, self.tenant_every_ms, self.tenant_for_ms) <= 0:
            raise ValueError("drift_ms, tenant_every_ms and tenant_for_ms must be above 0")


@dataclass(frozen=True)
class SimulatedGpu:
    """A board and its host. The defaults are an H200's, where it is known."""

    name: str = "simulated GPU"
    max_clock_mhz: float = 1980.0
    min_clock_mhz: float = 210.0
    """The power controller goes no lower."""
    idle_clock_mhz: float = 345.0
    ramp_ms: float = 4.0
    """From the idle clock to the highest, once something runs."""
    idle_after_ms: float = 1500.0
    """With nothing to do for this long, the clock falls back to idle."""
    power_limit_w: float = 700.0
    static_w: float = 150.0
    """``P_static``: drawn whenever the board is awake."""
    idle_w: float = 80.0
    power_exponent: float = 2.0
    """``alpha``; frequency times voltage squared lies between 1 and 3."""
    power_filter_ms: float = 60.0
    """Time constant of the first-order filter through which the power is read."""
    control_every_ms: float = 70.0
    """The power controller looks at the mean power so often, and then moves the clock in one step;
    0: it follows the filtered power all the time."""
    recovery: float = 0.5
    """Where it follows all the time: how fast the clock rises again below the cap, relative to its
    fall above it."""
    idle_temperature_c: float = 35.0
    heating_c_per_w: float = 0.05
    heating_ms: float = 15000.0
    """Time constant of the temperature."""
    launch_gap_us: float = 1.0
    """Between two calls of a filled queue; part of a call's time."""
    lone_launch_us: float = 5.0
    """What the events around a single launch see besides the kernel; part of its time."""
    event_us: float = 0.5
    """Resolution of event times."""
    host_sync_ms: float = 0.03
    """Host time after each wait for the GPU."""
    build_threads: int = 8
    """Plans that are compiled at run time build side by side on so many threads."""
    free_bytes: int = 64 * 2**30
    """Memory that a workspace can take."""
    power_reading_every_ms: float = 0.0
    """Milliseconds between power readings, which the running batch gets; 0: never."""
    lost_at_ms: float | None = None
    """From this time on every run and build raises RuntimeError, as CUDA does; None: never."""
    out_of_memory_at_ms: float | None = None
    """From this time on every run and build raises torch.OutOfMemoryError; None: never."""
    noise: Noise = field(default_factory=Noise)

    def __post_init__(self) -> None:
        above = "max_clock_mhz min_clock_mhz idle_clock_mhz ramp_ms power_limit_w power_exponent"
        above += " power_filter_ms recovery heating_ms event_us build_threads"
        _check(self, 1e-6, *above.split())
        at_least = "control_every_ms idle_after_ms static_w idle_w launch_gap_us lone_launch_us"
        at_least += " host_sync_ms power_reading_every_ms"
        _check(self, 0.0, "free_bytes", *at_least.split())
        if max(self.min_clock_mhz, self.idle_clock_mhz) > self.max_clock_mhz:
            raise ValueError(
                f"min_clock_mhz and idle_clock_mhz must be at most max_clock_mhz = "
                f"{self.max_clock_mhz:g}, got {self.min_clock_mhz:g} and {self.idle_clock_mhz:g}"
            )
        if self.static_w >= self.power_limit_w:
            raise ValueError(
                f"static_w must be below power_limit_w = {self.power_limit_w:g}, "
                f"got {self.static_w:g}"
            )


@dataclass(frozen=True)
class SimulatedEngine:
    """A candidate and what it does to the board."""

    candidate: Candidate
    time_ms: float
    """A call at the highest clock, cold cache, without the launch gap."""
    dynamic_w: float
    """``D``: what it draws above ``static_w`` at the highest clock."""
    clock_sensitivity: float = 1.0
    """``s``: 1 is compute-bound, 0 memory-bound."""
    hot_factor: float = 1.0
    """Time with operands in the L2 cache, relative to the cold one."""
    first_run_ms: float = 3.0
    """Loading its kernel, once."""
    build_ms: float = 0.01
    """Host time of building its plan; some 300 ms where it is compiled at run time."""
    builds: bool = True
    error: str = ""
    """Why it never runs; empty: it runs."""
    fails_at_ms: float | None = None
    """From this time on it fails to run; None: never."""

    def __post_init__(self) -> None:
        _check(self, 1e-6, "time_ms", "hot_factor")
        _check(self, 0.0, "dynamic_w", "clock_sensitivity", "first_run_ms", "build_ms")
        if self.clock_sensitivity > 1:
            raise ValueError(
                f"clock_sensitivity must be from 0 to 1, got {self.clock_sensitivity!r}"
            )

    def at(self, clock: float, cache: Cache) -> float:
        """Milliseconds a call without the gap; ``clock`` is relative to the highest."""
        s = self.clock_sensitivity
        time_ms = self.time_ms * ((1 - s) + s / clock)
        return time_ms * self.hot_factor if cache == "hot" else time_ms


def power_w(gpu: SimulatedGpu, dynamic_w: float, clock: float, busy: float = 1.0) -> float:
    """Of the board; ``clock`` is relative to the highest, ``busy`` the share without gaps."""
    return gpu.static_w + dynamic_w * busy * clock**gpu.power_exponent


def burst_ms(gpu: SimulatedGpu, engine: SimulatedEngine, cache: Cache) -> float:
    """A call in short batches at the highest clock, exactly."""
    return engine.at(1.0, cache) + gpu.launch_gap_us / 1e3


def steady_clock(gpu: SimulatedGpu, engine: SimulatedEngine, cache: Cache) -> float:
    """The clock, relative to the highest, at which the board settles when ``engine`` runs alone."""
    gap_ms = gpu.launch_gap_us / 1e3

    def power(clock: float) -> float:
        busy_ms = engine.at(clock, cache)
        return power_w(gpu, engine.dynamic_w, clock, busy_ms / (busy_ms + gap_ms))

    low, high = gpu.min_clock_mhz / gpu.max_clock_mhz, 1.0
    if power(high) <= gpu.power_limit_w:
        return high
    for _ in range(50):  # power rises with the clock
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle) < gpu.power_limit_w else (low, middle)
    return (low + high) / 2


def sustained_ms(gpu: SimulatedGpu, engine: SimulatedEngine, cache: Cache) -> float:
    """A call of ``engine`` alone once the clock is steady, exactly."""
    clock = steady_clock(gpu, engine, cache)
    return engine.at(clock, cache) + gpu.launch_gap_us / 1e3
