"""The comparison of candidates by the rounds so far: who survives, leads and is tied."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cudnn_autotune.sampling.statistics import Comparison, expected_gain

K = TypeVar("K")
"""The type of a candidate's key: :class:`Candidate` or a number."""


@dataclass
class Standings(Generic[K]):
    """The candidates of a race as its rounds so far compare them."""

    survivors: list[K] = field(default_factory=list)
    """Candidates that were not eliminated and did not fail."""
    log_time: dict[K, float] = field(default_factory=dict)
    """Log milliseconds of a call, as of the candidate's last comparison."""
    half_width: dict[K, float] = field(default_factory=dict)
    """Half width of the confidence interval of its difference (log) to any other one, as of the
    same comparison."""
    rounds: int = 0
    gpu_ms: float = 0.0
    """GPU time of all launches so far, in milliseconds."""
    error: float = 0.0
    """Standard error of the difference (log) of any two in the last comparison."""
    disturbed: int = 0
    """The number of disturbed samples (outliers) in the last comparison."""

    @property
    def best(self) -> K:
        return min(self.survivors, key=self.log_time.__getitem__)

    def ms(self, candidate: K) -> float:
        return math.exp(self.log_time[candidate])

    def leads(self, but: K, among: Collection[K] | None = None) -> list[float]:
        """Returns the upper bound of how much faster (log) each survivor (of those in ``among``)
        but ``but`` may be than the best."""
        best = self.log_time[self.best]
        others = (c for c in (self.survivors if among is None else among) if c != but)
        return [best - self.log_time[c] + self.half_width[c] for c in others]

    def judge(
        self, compared: Comparison, among: Sequence[K] | None = None
    ) -> list[tuple[K, K, float]]:
        """Eliminates those that cannot be the fastest by a new comparison of the survivors.

        Args:
            among: which of the survivors were compared; None: all.

        Returns:
            Each candidate that was eliminated, the best at this time, and the difference of their
            log times.
        """
        alive = list(self.survivors if among is None else among)
        leader, best = alive[compared.best], compared.log_time[compared.best]
        eliminated = []
        for candidate, log_time, is_out in zip(
            alive, compared.log_time, compared.is_out, strict=True
        ):
            self.log_time[candidate] = float(log_time)
            self.half_width[candidate] = compared.half_width
            if is_out:
                self.survivors.remove(candidate)
                eliminated.append((candidate, leader, float(log_time - best)))
        self.disturbed, self.error = compared.disturbed, compared.error
        return eliminated

    def tied(self, tie_width: float) -> list[K]:
        """Returns the survivors within ``tie_width`` (log) of the best."""
        best = self.log_time[self.best]
        return [c for c in self.survivors if self.log_time[c] - best <= tie_width]

    def indistinguishable(self) -> list[K]:
        """Returns the survivors whose times do not differ significantly from the best one's."""
        best = self.log_time[self.best]
        return [c for c in self.survivors if self.log_time[c] - best <= self.half_width[c]]

    def regret_bound(self, chosen: K, among: Collection[K] | None = None) -> float:
        """Returns how much slower than the fastest ``chosen`` is at most, relative.

        Args:
            among: the survivors of which the fastest may be one; None: all.
        """
        behind = self.log_time[chosen] - self.log_time[self.best]
        return max(0.0, math.expm1(behind + max([0.0, *self.leads(chosen, among)])))

    def expected_loss(self) -> float:
        """Returns by how much (log) the best is expected to be slower than the fastest: the sum of
        what each other survivor may gain, which is an upper bound."""
        best = self.log_time[self.best]
        behind = (self.log_time[c] - best for c in self.survivors if c != self.best)
        return sum(expected_gain(log, self.error) for log in behind)

    def interval(self, candidate: K, time_ms: float) -> tuple[float, float]:
        """Returns the confidence interval of a candidate's time, given its centre."""
        # The half width is that of a difference of two.
        spread = math.exp(self.half_width[candidate] / math.sqrt(2))
        return time_ms / spread, time_ms * spread
