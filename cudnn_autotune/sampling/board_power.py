"""What a call takes at the board's power limit, by readings of the power that it drew.

A board that is held at its limit is mostly not quite there. An H200's controller moves the clock,
leaves it for a tenth of a second or more, and moves it again: blocks of 0.12 s of one engine run at
clocks, and take times, that differ by 2 to 4 %. The power says by how much such a block was off.
With ``P ~ f ** EXPONENT``, a call that took ``t`` at ``P`` takes ``t * (P / P_limit) ** (1 /
EXPONENT)`` in the long run, when ``P`` is the limit: by that, blocks of one engine differ by half a
percent (``benchmarks/results/h200/board_power.json``, which is where the constants are from).

Readings are of instant power (NVML_FI_DEV_POWER_INSTANT). On an H200 each is a mean over some 25 ms
that ended some 10 ms before the reading shows; a new one comes every 100 ms (compare Yang et al.,
"Part-time Power Measurements", arXiv:2312.02741).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from cudnn_autotune.telemetry import GpuState, PowerReading

EXPONENT = 1.85
"""Of the power, as a function of the clock, near the limit."""
WINDOW_S = 0.025
LATE_S = 0.010
# Boards hold themselves a percent below their limit.
_HELD = 0.99
# Further from the limit, it is not the limit that holds the clock, or it has not begun to.
_NEAR = 0.1


def of_batches(
    durations_s: Sequence[float], end_s: float, readings: Iterable[PowerReading]
) -> list[float | None]:
    """For each batch the reading whose window has the batch's middle in it, or None.

    Only windows that the batches fill count: what ran before them is charged to nobody.

    Args:
        durations_s: of batches that ran one behind the other.
        end_s: when the last one was over, by the clock of the readings.
    """
    ends = end_s - sum(durations_s) + np.cumsum(durations_s)
    starts = ends - np.asarray(durations_s, dtype=float)
    middles = (starts + ends) / 2
    powers: list[float | None] = [None] * len(durations_s)
    for reading in readings:
        until = reading.seen_s - LATE_S
        since = until - WINDOW_S
        if not len(starts) or since < starts[0] or until > ends[-1]:
            continue
        for i in np.flatnonzero((middles >= since) & (middles <= until)):
            powers[int(i)] = reading.power_w
    return powers


def at_limit_ms(
    times_ms: Sequence[float],
    clocks_mhz: Sequence[float | None],
    powers_w: Sequence[float | None],
    board: GpuState,
) -> list[float]:
    """For each reading what a call takes at the power limit; empty where the limit does not hold
    the board, or where nothing was read.

    Args:
        times_ms, clocks_mhz, powers_w: of batches of one candidate, in their order.
        board: its power limit and its highest clock, beyond which no limit allows to go.
    """
    if board.power_limit_w is None:
        return []
    held_w = _HELD * board.power_limit_w
    found = []
    batches = zip(times_ms, clocks_mhz, powers_w, strict=True)
    for power_w, group in itertools.groupby(batches, key=lambda batch: batch[2]):
        if power_w is None or abs(power_w / held_w - 1) > _NEAR:
            continue
        times, clocks, _ = zip(*group, strict=True)
        factor = (power_w / held_w) ** (1 / EXPONENT)
        known = [clock for clock in clocks if clock is not None]
        if known and board.max_clock_mhz:
            factor = max(factor, float(np.median(known)) / board.max_clock_mhz)
        found.append(float(np.median(times)) * factor)
    return found
