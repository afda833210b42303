"""Replays the trace of a recorded sustained run, with its scatter in a new order."""

from __future__ import annotations

import bisect
import random
import statistics
from typing import NamedTuple

from cudnn_autotune.timers.offline import recorded_times
from cudnn_autotune.timers.offline.recorded_times import Bursts
from cudnn_autotune.timers.offline.recording import SoloTrace
from cudnn_autotune.timers.timer import Cache

MOST_AVERAGED = 16
"""Most recorded batches of which a long one is the mean; more would not reduce the noise."""


class Played(NamedTuple):
    """Time, clock and power of a batch, as in ``Sample``."""

    time_ms: float
    clock_mhz: float | None
    power_w: float | None = None


class SoloCurve:
    """The trace of a sustained run, split into a smooth curve and the scatter around it."""

    def __init__(self, trace: SoloTrace, bursts: Bursts) -> None:
        self._trace = trace
        self._curve = recorded_times.smoothed(trace.time_ms)
        self._scatter = [t / c for t, c in zip(trace.time_ms, self._curve, strict=True)]
        self._factor = {c: recorded_times.cache_factor(trace, c, bursts) for c in bursts}
        self._burst_ms = bursts
        last_ms = statistics.median(recorded_times.last_third(trace))
        self.slowdown = last_ms / self._burst_ms[trace.cache][trace.text]
        """The time at the end of the trace over the time in the rounds."""

    @property
    def text(self) -> str:
        """The text of the candidate whose trace it is."""
        return self._trace.text

    def relative_ms(self, text: str, cache: Cache) -> float:
        """Returns the time of another candidate in the rounds over the time of this one."""
        burst_ms = self._burst_ms[cache]
        return burst_ms[text] / burst_ms[self.text]

    def play(self, rng: random.Random, at_ms: float, duration_ms: float, cache: Cache) -> Played:
        """Returns a batch that begins ``at_ms`` after the run began."""
        trace, count = self._trace, len(self._curve)
        index = bisect.bisect_left(trace.at_ms, at_ms + duration_ms / 2)
        power_w = None
        if index >= count:  # beyond the end of the trace, the time stays as it was there
            index = rng.randrange(count - max(1, count // 4), count)
        else:
            power_w = trace.power_w[index]
        batches = duration_ms / (trace.calls * self._curve[index])
        drawn = min(max(1, round(batches)), MOST_AVERAGED)
        scatter = statistics.fmean(rng.choice(self._scatter) for _ in range(drawn))
        time_ms = self._curve[index] * scatter * self._factor[cache]
        return Played(time_ms, trace.clock_mhz[index], power_w)
