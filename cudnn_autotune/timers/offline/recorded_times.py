"""What a recording says of a candidate's time, from all of its samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from cudnn_autotune.timers.offline.recording import Recording, Rounds, SoloTrace
from cudnn_autotune.timers.timer import Cache

_SMOOTHED = 4
"""Batches on either side that a trace's curve is smoothed over."""


Bursts = Mapping[Cache, Mapping[str, float]]
"""Of each cache state what :func:`burst_ms` says: worked out once for all that ask."""


def bursts(recording: Recording) -> Bursts:
    return {"cold": burst_ms(recording, "cold"), "hot": burst_ms(recording, "hot")}


def burst_ms(recording: Recording, cache: Cache) -> dict[str, float]:
    """Milliseconds a call in the rounds, by text; of what ran, but in no round, its own runs. A
    candidate that failed, now or then, has none.

    The median over the rounds of the logarithms, less what all candidates of a round share.
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
    """By round: the median over its candidates of how far their log times are off their medians."""
    columns = list(zip(*rounds.time_ms, strict=True))
    logs = [[math.log(t) for t in column if t is not None] for column in columns]
    # One that sat out some rounds has a median of other rounds than the rest.
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
    """Milliseconds a call at the end of the solo traces, by text; only of those that have one.

    The median over the last third of a trace. From a trace of the other cache state it follows by
    the ratio of the burst times.
    """
    found: dict[str, list[float]] = {}
    for trace in sound_traces(recording):
        factor = cache_factor(trace, cache, bursts)
        found.setdefault(trace.text, []).append(statistics.median(last_third(trace)) * factor)
    return {text: statistics.fmean(times) for text, times in found.items()}


def sound_traces(recording: Recording) -> list[SoloTrace]:
    """Those of candidates that did not fail."""
    failed = {r.text for r in recording.candidates if r.error}
    return [trace for trace in recording.solo if trace.text not in failed]


def last_third(trace: SoloTrace) -> Sequence[float]:
    """The times that count as steady."""
    return trace.time_ms[-max(1, len(trace.time_ms) // 3) :]


def cache_factor(trace: SoloTrace, cache: Cache, bursts: Bursts) -> float:
    """What a trace's times are to be multiplied by for another cache state."""
    if trace.cache == cache:
        return 1.0
    return bursts[cache][trace.text] / bursts[trace.cache][trace.text]


def call_overhead_ms(recording: Recording) -> float:
    """Host time a launch takes beyond its own: a round's overhead over the launches of one.

    So that a run of a few launches does not pay for a whole round's.
    """
    rounds = recording.cold
    launches = [
        sum(calls for calls, t in zip(rounds.calls, row, strict=True) if t is not None)
        for row in rounds.time_ms
    ]
    middle = statistics.median(launches) if launches else 0.0
    return recording.run_overhead_ms / middle if middle else 0.0


def smoothed(values: Sequence[float]) -> list[float]:
    """The running median of nine; of fewer, and evenly many to both sides, at the ends."""
    curve = []
    for i in range(len(values)):
        reach = min(_SMOOTHED, i, len(values) - 1 - i)
        curve.append(statistics.median(values[i - reach : i + reach + 1]))
    return curve
