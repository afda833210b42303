"""The distances of decisions from the limits that the GPU's peaks set."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from cudnn_autotune.engines.roofline import Limit, Peaks, limit
from cudnn_autotune.store.decision import Decision


@dataclass(frozen=True)
class Far:
    """A decision with a time, and the limit of its problem."""

    decision: Decision
    time_ms: float
    """Milliseconds of a call in short batches."""
    limit: Limit

    @property
    def times_limit(self) -> float:
        return self.limit.times(self.time_ms)

    @property
    def gain_ms(self) -> float:
        return self.limit.gain_ms(self.time_ms)


def far(decision: Decision, peaks: Peaks | None) -> Far | None:
    """Compares a decision with its limit; None if the peaks are not known, or the mode did not time
    what was chosen."""
    chosen = decision.chosen
    if peaks is None or chosen is None or not chosen.time_ms:
        return None
    return Far(decision, chosen.time_ms, limit(decision.problem, peaks))


def farthest(decisions: Iterable[Decision], peaks: Peaks | None, most: int) -> list[Far]:
    """Returns those with the most time to win, first the most; only decisions slower than their
    limit."""
    found = (one for d in decisions if (one := far(d, peaks)) is not None and one.gain_ms > 0)
    return heapq.nsmallest(most, found, key=lambda one: -one.gain_ms)
