"""The steady time of a call, from one sustained run at the board's power limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cudnn_autotune.timers.board_power import FAR, at_limit_ms
from cudnn_autotune.timers.timer import Cache, GpuState, Sample


@dataclass(frozen=True)
class SteadyTime:
    """A candidate's steady time by one sustained run."""

    time_ms: float
    """The geometric mean over the cache states, brought to the power limit if it was read."""
    clock_mhz: float | None


def steady_time(ran: Sequence[tuple[Cache, Sample]], board: GpuState) -> SteadyTime:
    """Returns the time of one sustained run, from the batches at the candidate's own clock.

    A power controller lets one run draw somewhat more than another. Where the board's power was
    read in the last two thirds of the run, the time is that at the power limit.

    Args:
        ran: its batches in their order, some of each cache state; none of them failed.
        board: a reading of the board with its power limit and its highest clock.
    """
    caches = sorted({cache for cache, _ in ran})
    steady = ran[-max(2 * len(caches), len(ran) // 3) :]
    level_ms = {
        cache: float(np.median([s.time_ms for c, s in steady if c == cache])) for cache in caches
    }
    relative = at_limit_ms(
        [s.time_ms / level_ms[cache] for cache, s in ran],
        [s.clock_mhz for _, s in ran],
        [s.power_w for _, s in ran],
        board,
        since=len(ran) // 3,
        within=FAR,
    )
    log = float(np.mean(np.log(list(level_ms.values()))))
    if relative:
        log += float(np.mean(np.log(relative)))
    clocks = [s.clock_mhz for _, s in steady if s.clock_mhz is not None]
    return SteadyTime(math.exp(log), float(np.median(clocks)) if clocks else None)
