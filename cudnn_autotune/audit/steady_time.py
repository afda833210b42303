"""Steady times from sustained runs, corrected to one power if the power limit held the clock.

How far a time depends on the clock comes from the regression that ``sampling`` uses, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cudnn_autotune.timers.board_power import clock_sensitivity
from cudnn_autotune.timers.timer import Cache, Sample

# Power grows with about the square of the clock, so time falls with its square root. This prior
# counts as much as four runs whose powers differ by a percent.
_PRIOR_SLOPE = -0.5
_PRIOR_SQUARES = 4 * 0.01**2
# The power limit did not hold a run whose power is further, relatively, from that of the others.
_NEAR_LIMIT = 0.1


@dataclass(frozen=True)
class SteadyTime:
    """A candidate's steady time by one sustained run."""

    time_ms: float
    clock_mhz: float | None
    power_w: float | None = None
    """Mean of the power readings in the run; None unless the power limit held the clock."""
    sensitivity: float = 1.0
    """See ``board_power.clock_sensitivity``."""


def steady_time(ran: Sequence[tuple[Cache, Sample]]) -> SteadyTime:
    """Returns the time of one sustained run, from the batches at the candidate's own clock.

    Args:
        ran: its batches in their order, some of each cache state; none of them failed.
    """
    states = sorted({cache for cache, _ in ran})
    groups = itertools.groupby(ran[len(ran) // 3 :], key=lambda row: row[1].power_w)
    read = [(power_w, list(rows)) for power_w, rows in groups if power_w is not None]
    counted = ran[-max(2 * len(states), len(ran) * 2 // 3 if read else len(ran) // 3) :]
    levels = {
        cache: math.log(float(np.median([s.time_ms for c, s in counted if c == cache])))
        for cache in states
    }
    log = float(np.mean(list(levels.values())))
    clocks = [s.clock_mhz for _, s in counted if s.clock_mhz is not None]
    clock_mhz = float(np.median(clocks)) if clocks else None
    if not read:
        return SteadyTime(math.exp(log), clock_mhz)
    # The time is taken at the moments of the power readings.
    log += float(
        np.mean([np.mean([math.log(s.time_ms) - levels[c] for c, s in r]) for _, r in read])
    )
    sensitivity = [
        clock_sensitivity([s.time_ms for s in some], [s.clock_mhz for s in some])
        for some in ([s for c, s in ran if c == cache] for cache in states)
    ]
    return SteadyTime(
        math.exp(log),
        clock_mhz,
        float(np.mean([power_w for power_w, _ in read])),
        float(np.mean(sensitivity)),
    )


def at_one_power(blocks: Mapping[str, Sequence[SteadyTime]]) -> dict[str, list[float]]:
    """Returns the times of sustained runs, corrected to one power if the power limit held them.

    A power controller lets one run draw somewhat more than another. The correction goes by the
    slope of log(time) over log(power) that the runs of each candidate show among themselves, times
    the candidate's clock sensitivity, to the mean power of all runs. A run whose power is unknown,
    or far from that of the others, stays as it is, and is left out if two or more runs of its
    candidate were corrected.
    """
    held = {
        text: [math.log(block.power_w or math.inf) for block in some]
        for text, some in blocks.items()
    }
    known = [log for logs in held.values() for log in logs if log < math.inf]
    if not known:
        return {text: [block.time_ms for block in some] for text, some in blocks.items()}
    middle = float(np.median(known))

    def is_held(log: float) -> bool:
        return abs(log - middle) <= _NEAR_LIMIT

    mean = float(np.mean([log for log in known if is_held(log)]))
    across, along = _PRIOR_SLOPE * _PRIOR_SQUARES, _PRIOR_SQUARES
    for text, some in blocks.items():
        rows = [
            (block.sensitivity * (log - mean), math.log(block.time_ms))
            for block, log in zip(some, held[text], strict=True)
            if is_held(log)
        ]
        if rows:
            own = np.array(rows)
            x, y = (own - own.mean(axis=0)).T
            across += float(x @ y)
            along += float(x @ x)
    slope = min(0.0, max(2 * _PRIOR_SLOPE, across / along))

    found = {}
    for text, some in blocks.items():
        pairs = list(zip(some, held[text], strict=True))
        brought = [
            block.time_ms * math.exp(slope * block.sensitivity * (mean - log))
            for block, log in pairs
            if is_held(log)
        ]
        as_they_are = [block.time_ms for block, log in pairs if not is_held(log)]
        found[text] = brought if len(brought) > 1 else [*brought, *as_they_are]
    return found
