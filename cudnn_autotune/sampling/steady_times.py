"""What the sustained runs of several candidates say about their steady times, and how surely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.sustained_run import FAR_READING_SIGMA, RUN_SIGMA

# Of three runs or more the worst is left out where the power was not read.
_TRIMMED_FROM = 3
_PRIOR_FREEDOM = 4
# Times at the power limit, however many runs they are from, differ by so much from those of long
# runs (docs/findings/power-limit.md).
_POWER_ERROR = 0.0065


class SteadyLog(NamedTuple):
    """What one sustained run says: the logarithm of the steady time."""

    value: float
    sigma: float = RUN_SIGMA
    """Standard deviation of ``value``."""
    readings: int = 0
    """How many readings of the board's power it rests on."""


@dataclass
class SteadyTimes:
    """The sustained runs of the steady-state final."""

    handicaps: dict[Candidate, float] = field(default_factory=dict)
    """What is added to the log time of each contender: for what it loses in the race, and for not
    being the race's leader."""
    logs: dict[Candidate, list[SteadyLog]] = field(default_factory=dict)
    """The runs of each candidate that did not fail."""
    finalists: list[Candidate] = field(default_factory=list)
    is_out_of_time: bool = False
    """Whether the budget left out a run that was wanted."""
    prior_sigma: float = RUN_SIGMA
    """Standard deviation of runs without a reading, as far as repeated runs do not tell better."""

    @property
    def readings(self) -> int:
        """How many readings of the board's power the times rest on."""
        return sum(run.readings for runs in self.logs.values() for run in runs)

    def sustained_ms(self) -> dict[Candidate, float]:
        return {c: math.exp(self.mean(c)) for c in self.logs}

    def noise(self, *candidates: Candidate) -> float:
        """Returns the standard error of the log of one candidate's time, or of the ratio of two, as
        far as more runs would reduce it."""
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
        """Returns how much less certain its score is than the most certain one."""
        return self.noise(candidate) - min(self.noise(c) for c in self.logs)

    def best(self) -> Candidate:
        return min(self.finalists, key=self.score)

    def mean(self, candidate: Candidate) -> float:
        """Returns the weighted mean of the log times.

        Where the power was not read, the worst of three runs or more is left out, since its clock
        may still have paid for another one's run. It counts until all finalists have three runs:
        the best of two against the best two of three would be no fair comparison.
        """
        runs = self.logs[candidate]
        others = [self.logs.get(c, ()) for c in self.finalists]
        is_trimmed = len(runs) >= _TRIMMED_FROM and all(
            len(some) >= _TRIMMED_FROM and not _is_read(some) for some in others
        )
        kept = sorted(runs)[:-1] if is_trimmed else runs
        return float(np.average([run.value for run in kept], weights=_weights(kept)))

    def _scale(self) -> float:
        """Returns the factor by which runs differ more, or less, than their sigmas say, by those
        that were repeated. A few runs say little: the prior counts as four degrees of freedom."""
        squares, freedom = _PRIOR_FREEDOM * (self.prior_sigma / RUN_SIGMA) ** 2, _PRIOR_FREEDOM
        for runs in self.logs.values():
            values, weights = np.array([run.value for run in runs]), _weights(runs)
            squares += float(weights @ (values - np.average(values, weights=weights)) ** 2)
            freedom += len(runs) - 1
        return math.sqrt(squares / freedom)


def _is_read(runs: Sequence[SteadyLog]) -> bool:
    """Returns whether the power was read in some of the runs, near its limit or often."""
    return any(run.sigma < FAR_READING_SIGMA for run in runs)


def _weights(runs: Sequence[SteadyLog]) -> npt.NDArray[np.float64]:
    return np.array([run.sigma**-2 for run in runs])
