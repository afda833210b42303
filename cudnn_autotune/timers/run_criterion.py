"""Decides when a sustained run of an audit is long enough."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion
from cudnn_autotune.timers.timer import Cache, Sample

STRETCH = 5
"""The number of batches of each cache state between two checks of whether the time is steady."""


class RunCriterion(StoppingCriterion[Sequence[tuple[Cache, Sample]]]):
    """Stops a run of batches of ``calls`` calls once the time is steady in every cache state, after
    ``least_ms`` of GPU time at the least and ``most_ms`` at the most. A time is steady if it
    changes by less than ``tolerance`` (relative)."""

    def __init__(self, calls: int, least_ms: float, most_ms: float, tolerance: float) -> None:
        self._calls = calls
        self._least_ms = least_ms
        self._most_ms = most_ms
        self._tolerance = tolerance
        self._times: dict[Cache, list[float]] = {}
        self.spent_ms = 0.0

    def add_measurement(self, measurement: Sequence[tuple[Cache, Sample]]) -> None:
        """Takes further batches into account, each with its cache state."""
        for cache, sample in measurement:
            self._times.setdefault(cache, []).append(sample.time_ms)
            self.spent_ms += sample.time_ms * self._calls
        if self.spent_ms >= self._least_ms and all(map(self._is_steady, self._times.values())):
            self.reason = Reason.DECIDED
        elif self.spent_ms >= self._most_ms:
            self.reason = Reason.LIMIT

    def _is_steady(self, times: Sequence[float]) -> bool:
        """Returns whether the last third of a run agrees with the third before it."""
        third = len(times) // 3
        if third < STRETCH:
            return False
        last, before = times[-third:], times[-2 * third : -third]
        return bool(abs(np.median(last) / np.median(before) - 1) < self._tolerance)
