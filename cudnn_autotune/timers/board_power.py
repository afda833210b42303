"""Correction of a call's time to the board's power limit, by readings of the power.

A board at its power limit mostly draws a little more or less. An H200's controller changes the
clock every tenth of a second or more. So sustained runs of 0.16 s of one engine differ by some 2 %
in their clocks and times. The power gives the error of such a run. Assume ``P ~ f ** EXPONENT`` and
``t ~ f ** -s``. A call that took ``t`` at ``P`` takes ``t * (P / P_limit) ** (s / EXPONENT)`` in
the long run, when ``P`` is the limit. ``s`` is 1 for an engine bound by computing and 0 for one
bound by memory. It is estimated from the times and clocks of a run's batches. Corrected in this
way, runs of one engine differ by half a percent. The constants are from
docs/findings/power-limit.md.

One run in twelve is nowhere near the limit: after too much power the controller takes the clock
down by up to a fifth, and slowly back. Such a run takes up to a fifth more time than in the long
run. Its power gives this excess to 1 or 2 %.

Readings are of instant power (NVML_FI_DEV_POWER_INSTANT). On an H200 each is a mean over some 25 ms
that ended some 10 ms before the reading appears. A new one comes every 100 ms (see Yang et al.,
"Part-time Power Measurements", arXiv:2312.02741).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from cudnn_autotune.timers.telemetry import GpuState, PowerReading

EXPONENT = 1.85
"""Exponent of the power as a function of the clock, near the limit."""
WINDOW_S = 0.025
LATE_S = 0.010
ARRIVAL_MS = 30.0
"""Milliseconds from a run's start in which clock and readings may belong to earlier work."""
NEAR_LIMIT = 0.1
"""Relative distance from the limit beyond which a reading is less accurate."""
FAR_FROM_LIMIT = 0.25
"""Relative distance from the limit beyond which a reading is not used."""
# Boards hold their power a percent below the limit.
_HELD = 0.99
_LONGEST_S = 2 * WINDOW_S
# The prior, a candidate bound by the clock, counts as four batches whose clocks differ by a
# percent.
_PRIOR_SQUARES = 4 * 0.01**2


def of_batches(
    durations_s: Sequence[float], end_s: float, readings: Iterable[PowerReading]
) -> list[float | None]:
    """Returns for each batch the reading whose window contains the batch's middle, or None.

    Readings count only while the power limit held the clock, and where batches fill the whole
    window. A reading is a poor estimate for a batch that is much longer than its window.

    Args:
        durations_s: durations of batches that ran one after another.
        end_s: the end of the last one, by the clock of the readings.
    """
    ends = end_s - sum(durations_s) + np.cumsum(durations_s)
    starts = ends - np.asarray(durations_s, dtype=float)
    middles = np.where(ends - starts <= _LONGEST_S, (starts + ends) / 2, math.inf)
    powers: list[float | None] = [None] * len(durations_s)
    for reading in readings:
        until = reading.seen_s - LATE_S
        since = until - WINDOW_S
        if not reading.is_capped or not len(starts) or since < starts[0] or until > ends[-1]:
            continue
        for i in np.flatnonzero((middles >= since) & (middles <= until)):
            powers[int(i)] = reading.power_w
    return powers


def arrived(durations_ms: Sequence[float]) -> int:
    """Returns the number of the first batch of a sustained run that began after ``ARRIVAL_MS``."""
    starts = np.cumsum(durations_ms) - np.asarray(durations_ms, dtype=float)
    return int(np.searchsorted(starts, ARRIVAL_MS))


def clock_sensitivity(times_ms: Sequence[float], clocks_mhz: Sequence[float | None]) -> float:
    """Returns ``s`` of ``t ~ f ** -s``, from 0 to 1, for batches of one candidate.

    It is about 1 if the clock hardly moved or is unknown: most convolutions are bound by it.
    """
    known = [(t, f) for t, f in zip(times_ms, clocks_mhz, strict=True) if f is not None]
    if not known:
        return 1.0
    times, clocks = np.log(np.array(known)).T
    clocks -= clocks.mean()
    slope = (_PRIOR_SQUARES - clocks @ times) / (_PRIOR_SQUARES + clocks @ clocks)
    return float(np.clip(slope, 0.0, 1.0))


def at_limit_ms(
    times_ms: Sequence[float],
    clocks_mhz: Sequence[float | None],
    powers_w: Sequence[float | None],
    board: GpuState,
    since: int = 0,
    exponent: float = EXPONENT,
    within: float = NEAR_LIMIT,
) -> list[float]:
    """Returns, for each reading, the time of a call at the power limit.

    Args:
        times_ms, clocks_mhz, powers_w: samples of batches of one candidate, in their order.
        board: a reading of the board with its power limit and its highest clock.
        since: number of the first batch that counts; readings of an earlier one do not.
        exponent: exponent of the power as a function of the clock.
        within: readings further from the limit (relative) do not count. If the clock is unknown,
            the bound is ``NEAR_LIMIT``, because the clock might be the highest already.
    """
    if board.power_limit_w is None:
        return []
    held_w = _HELD * board.power_limit_w
    early = set(powers_w[:since])
    sensitivity = clock_sensitivity(times_ms, clocks_mhz)
    found = []
    batches = zip(times_ms, clocks_mhz, powers_w, strict=True)
    for power_w, group in itertools.groupby(batches, key=lambda batch: batch[2]):
        if power_w is None or power_w in early:
            continue
        times, clocks, _ = zip(*group, strict=True)
        known = [clock for clock in clocks if clock is not None]
        most = None  # factor to the highest clock
        if known and board.max_clock_mhz:
            most = board.max_clock_mhz / float(np.median(known))
        if abs(power_w / held_w - 1) > (min(within, NEAR_LIMIT) if most is None else within):
            continue
        faster = (held_w / power_w) ** (1 / exponent)  # the clock at the limit
        if most is not None:
            faster = min(faster, most)
        found.append(float(np.median(times)) / faster**sensitivity)
    return found
