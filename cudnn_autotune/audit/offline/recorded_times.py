"""Estimates of candidates' times from all samples of a recording."""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cudnn_autotune.audit.offline.recording import Recording, Rounds, SoloTrace
from cudnn_autotune.sampling import Cache

_SMOOTHED = 4
"""Number of batches on either side over which a trace's curve is smoothed."""

Bursts = Mapping[Cache, Mapping[str, float]]
"""The results of :func:`burst_ms`, by cache state."""


def bursts(recording: Recording) -> Bursts:
    """Returns :func:`burst_ms` of both cache states."""
    return {"cold": burst_ms(recording, "cold"), "hot": burst_ms(recording, "hot")}


def burst_ms(recording: Recording, cache: Cache) -> dict[str, float]:
    """Returns milliseconds of a call in the rounds, by text.

    It is the exponential of the median over the rounds of the log times, less the effect of each
    round. A candidate that ran, but in no round, has the time of its first runs; one that failed
    has none.
    """
    rounds = recording.cold if cache == "cold" else recording.hot
    shared = _shared(rounds)
    found: dict[str, float] = {}
    for column, recorded in enumerate(recording.candidates):
        if recorded.error:
            continue
        logs = [
            math.log(row[column] or 1.0) - effect
            for row, effect in zip(rounds.time_ms, shared, strict=True)
            if row[column] is not None
        ]
        alone_ms = recorded.warm_ms or recorded.first_run_ms
        if logs:
            found[recorded.text] = math.exp(statistics.median(logs))
        elif alone_ms is not None:
            found[recorded.text] = alone_ms
    return found


def _shared(rounds: Rounds) -> list[float]:
    """Returns for each round the median distance of its log times from the candidates' medians."""
    columns = list(zip(*rounds.time_ms, strict=True))
    logs = [[math.log(t) for t in column if t is not None] for column in columns]
    # The median of a candidate that missed some rounds is of other rounds than those of the rest.
    middle = [
        statistics.median(column) if column and len(column) == len(rounds.time_ms) else None
        for column in logs
    ]
    effects = []
    for row in rounds.time_ms:
        off = [
            math.log(t) - m
            for t, m in zip(row, middle, strict=True)
            if t is not None and m is not None
        ]
        effects.append(statistics.median(off) if off else 0.0)
    return effects


def sustained_ms(recording: Recording, cache: Cache, bursts: Bursts) -> dict[str, float]:
    """Returns milliseconds of a call at the end of the solo traces, by text.

    It is the median over the last third of a trace. A trace of the other cache state is multiplied
    by the ratio of the burst times.
    """
    found: dict[str, list[float]] = {}
    for trace in sound_traces(recording):
        factor = cache_factor(trace, cache, bursts)
        found.setdefault(trace.text, []).append(statistics.median(last_third(trace)) * factor)
    return {text: statistics.fmean(times) for text, times in found.items()}


def sound_traces(recording: Recording) -> list[SoloTrace]:
    """Returns the traces of candidates that did not fail."""
    failed = {r.text for r in recording.candidates if r.error}
    return [trace for trace in recording.solo if trace.text not in failed]


def last_third(trace: SoloTrace) -> Sequence[float]:
    """Returns the times of a trace that count as steady."""
    return trace.time_ms[-max(1, len(trace.time_ms) // 3) :]


def cache_factor(trace: SoloTrace, cache: Cache, bursts: Bursts) -> float:
    """Returns the factor from a trace's times to those of a cache state."""
    if trace.cache == cache:
        return 1.0
    return bursts[cache][trace.text] / bursts[trace.cache][trace.text]


def call_overhead_ms(recording: Recording) -> float:
    """Returns the host time that each launch adds: a round's overhead over its launches.

    So a run of a few launches is not charged the overhead of a whole round.
    """
    rounds = recording.cold
    launches = [
        sum(calls for calls, t in zip(rounds.calls, row, strict=True) if t is not None)
        for row in rounds.time_ms
    ]
    middle = statistics.median(launches) if launches else 0.0
    return recording.run_overhead_ms / middle if middle else 0.0


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the running median of nine values; near the ends of fewer, with as many before as
    after."""
    curve = []
    for i in range(len(values)):
        reach = min(_SMOOTHED, i, len(values) - 1 - i)
        curve.append(statistics.median(values[i - reach : i + reach + 1]))
    return curve


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
        self._curve = smoothed(trace.time_ms)
        self._scatter = [t / c for t, c in zip(trace.time_ms, self._curve, strict=True)]
        self._factor = {c: cache_factor(trace, c, bursts) for c in bursts}
        self._burst_ms = bursts
        last_ms = statistics.median(last_third(trace))
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
