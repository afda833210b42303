"""Estimates steady times, with standard errors, from the sustained runs of several candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.sustained_run import FAR_READING_SIGMA, RUN_SIGMA

# The slowest of three runs or more is left out if the power was not read.
_TRIMMED_FROM = 3
_PRIOR_FREEDOM = 4
# Times at the power limit, however many runs they are from, differ by this much from those of long
# runs (docs/findings/power-limit.md).
_POWER_ERROR = 0.0065


class SteadyLog(NamedTuple):
    """The logarithm of the steady time by one sustained run."""

    value: float
    sigma: float = RUN_SIGMA
    """Standard deviation of ``value``."""
    readings: int = 0
    """The number of readings of the board's power behind ``value``."""


@dataclass
class SteadyTimes:
    """The sustained runs of the steady-state final."""

    handicaps: dict[Candidate, float] = field(default_factory=dict)
    """The terms added to the log time of each contender: its weighted loss in the race, and the
    advantage that only the race's leader has."""
    logs: dict[Candidate, list[SteadyLog]] = field(default_factory=dict)
    """The runs of each candidate that did not fail."""
    finalists: list[Candidate] = field(default_factory=list)
    is_out_of_time: bool = False
    """Whether the budget excluded a run that the final asked for."""

    @property
    def readings(self) -> int:
        """The number of readings of the board's power behind the times."""
        return sum(run.readings for runs in self.logs.values() for run in runs)

    def sustained_ms(self) -> dict[Candidate, float]:
        return {c: math.exp(self.mean(c)) for c in self.logs}

    def noise(self, *candidates: Candidate) -> float:
        """Returns the part of :meth:`error` that more runs would reduce."""
        scale = self._scale()
        return math.hypot(*(scale / math.sqrt(_weights(self.logs[c]).sum()) for c in candidates))

    def error(self, *candidates: Candidate) -> float:
        """Returns the standard error of the log of one candidate's time, or of the ratio of two."""
        by_power = (_POWER_ERROR for c in candidates if _is_read(self.logs[c]))
        return math.hypot(self.noise(*candidates), *by_power)

    def score(self, candidate: Candidate) -> float:
        """Returns the log time with its handicap: the lowest score wins."""
        return self.mean(candidate) + self.handicaps.get(candidate, 0.0)

    def doubt(self, candidate: Candidate) -> float:
        """Returns how much larger the standard error of its score is than the smallest one."""
        return self.noise(candidate) - min(self.noise(c) for c in self.logs)

    def best(self) -> Candidate:
        return min(self.finalists, key=self.score)

    def mean(self, candidate: Candidate) -> float:
        """Returns the weighted mean of the log times.

        Where the power was not read, the worst of three runs or more is left out, since the
        candidate before it may have lowered its clock. It counts until all finalists have three
        runs: the best of two against the best two of three would be no fair comparison.
        """
        runs = self.logs[candidate]
        others = [self.logs.get(c, ()) for c in self.finalists]
        is_trimmed = len(runs) >= _TRIMMED_FROM and all(
            len(some) >= _TRIMMED_FROM and not _is_read(some) for some in others
        )
        kept = sorted(runs)[:-1] if is_trimmed else runs
        return float(np.average([run.value for run in kept], weights=_weights(kept)))

    def _scale(self) -> float:
        """Returns the ratio of the scatter of repeated runs to their sigmas. Because a few runs
        estimate it poorly, a ratio of 1 counts as four degrees of freedom."""
        squares, freedom = float(_PRIOR_FREEDOM), _PRIOR_FREEDOM
        for runs in self.logs.values():
            values, weights = np.array([run.value for run in runs]), _weights(runs)
            squares += float(weights @ (values - np.average(values, weights=weights)) ** 2)
            freedom += len(runs) - 1
        return math.sqrt(squares / freedom)


def _is_read(runs: Sequence[SteadyLog]) -> bool:
    """Returns whether the power was read in some of the runs, near its limit or several times."""
    return any(run.sigma < FAR_READING_SIGMA for run in runs)


def _weights(runs: Sequence[SteadyLog]) -> npt.NDArray[np.float64]:
    return np.array([run.sigma**-2 for run in runs])
