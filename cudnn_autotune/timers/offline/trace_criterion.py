"""Decides when a sustained run of a recording is long enough."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion
from cudnn_autotune.timers.timer import Sample

_LEAST_MS = 600.0
"""The least GPU time of a run, in milliseconds."""
_STEADY = 0.003
"""Time and clock are steady if they change by less than this (relative)."""


class TraceCriterion(StoppingCriterion[Sequence[Sample]]):
    """Stops a run once its last quarter agrees with its second quarter, in time and clock."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._samples: list[Sample] = []

    def add_measurement(self, measurement: Sequence[Sample]) -> None:
        """Takes further batches of the run into account."""
        self._samples += measurement
        spent_ms = sum(sample.time_ms for sample in self._samples) * self._calls
        quarter = len(self._samples) // 4
        if spent_ms < _LEAST_MS or quarter < 2:
            return
        parts = self._samples[quarter : 2 * quarter], self._samples[-quarter:]
        times = [statistics.median(s.time_ms for s in part) for part in parts]
        clocks = [statistics.median(s.clock_mhz or 1.0 for s in part) for part in parts]
        if all(abs(late / early - 1) < _STEADY for early, late in (times, clocks)):
            self.reason = Reason.DECIDED
