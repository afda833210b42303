"""The settings of a race, and the criteria that stop it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.standings import Standings
from cudnn_autotune.sampling.statistics import Comparison, Floats, compare
from cudnn_autotune.sampling.ties import TIE_WIDTH
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion
from cudnn_autotune.timers.timer import Cache

# A race that another one follows may stop once nobody can beat its best by more than this: nearer
# candidates run in the next race, which tells them apart.
_FINALISTS_WITHIN = 0.03
# Two rounds in each cache state are the least that has residuals.
_FINALISTS_ROUNDS = 4
# Such a race gets this share of a race's GPU time, so that both take little more time than one.
_FINALISTS_SHARE = 0.4
# If more than this share of the samples was disturbed, a few rounds may all have been hit: the
# race takes three times as many rounds at least.
_DISTURBED_SHARE = 0.02
_DISTURBED_FACTOR = 3


@dataclass(frozen=True)
class RaceRules:
    """The settings of a race."""

    confidence: float = 0.95
    tie_width: float = TIE_WIDTH
    """Relative lead over the best at which a survivor keeps the race going: the race stops once
    none can have it."""
    least_rounds: int = 6
    most_rounds: int = 40
    batch_ms: float = 0.7
    most_calls: int = 64
    """Most calls in a batch. A batch of very short calls is shorter than ``batch_ms``."""
    gpu_ms: float = 100.0
    """GPU milliseconds after which the race stops, decided or not, unless calls are slow."""
    gpu_calls: int = 250
    """Calls of the fastest candidate whose GPU time ends a race of slow calls."""
    most_gpu_ms: float = 400.0
    """GPU milliseconds after which any race stops."""
    warm_ms: float = 10.0
    """Milliseconds for which the leader runs before the first round, so that the clock leaves
    its idle state."""
    caches: tuple[Cache, ...] = ("cold", "hot")
    """The cache states that rounds go through by turns (docs/findings/cold-and-hot.md)."""
    least_sigma: float = 0.0015
    """Lower bound of the standard deviation of a sample's log time; it is that of batches on a
    board without other load."""
    prior_sigma: float = 0.01
    """Lower bound of the standard deviation while residuals have fewer than ``prior_freedom``
    degrees of freedom; it is that of a usual board."""
    prior_freedom: int = 12

    def for_finalists(self) -> RaceRules:
        """Returns the rules of a race that only has to find the candidates for the next race."""
        return replace(
            self,
            tie_width=_FINALISTS_WITHIN,
            least_rounds=_FINALISTS_ROUNDS,
            gpu_ms=_FINALISTS_SHARE * self.gpu_ms,
            gpu_calls=int(_FINALISTS_SHARE * self.gpu_calls),
        )

    def is_out_of_time(self, gpu_ms: float, best_ms: float) -> bool:
        """Returns whether a race whose fastest call takes ``best_ms`` has used up its GPU time."""
        limit_ms = min(self.gpu_calls * best_ms, self.most_gpu_ms)
        return gpu_ms > max(self.gpu_ms, limit_ms)

    def compare(self, groups: Sequence[Floats]) -> Comparison:
        """Compares candidates by rounds; see :func:`statistics.compare`."""
        return compare(
            groups,
            delta=1 - self.confidence,
            least_sigma=self.least_sigma,
            prior_sigma=self.prior_sigma,
            prior_freedom=self.prior_freedom,
        )


class LeadCriterion(StoppingCriterion[Standings[Any]]):
    """Stops once no survivor can beat the best by a tie width, or after ``rules.most_rounds``."""

    def __init__(self, rules: RaceRules) -> None:
        self.rules = rules

    def add_measurement(self, measurement: Standings[Any]) -> None:
        leads = measurement.leads(but=measurement.best)
        is_decided = all(lead < self.rules.tie_width for lead in leads)
        if is_decided and measurement.rounds >= self.least_rounds(measurement):
            self.reason = Reason.DECIDED
        else:
            is_over = measurement.rounds >= self.rules.most_rounds
            self.reason = Reason.LIMIT if is_over else None

    def least_rounds(self, measurement: Standings[Any]) -> int:
        return self.rules.least_rounds


class RaceCriterion(LeadCriterion):
    """Stops a race that has the GPU to itself: as ``LeadCriterion``, and when one candidate is
    left, or the rules' GPU time or the budget is used up."""

    def __init__(self, rules: RaceRules, budget: Budget) -> None:
        super().__init__(rules)
        self._budget = budget

    def add_measurement(self, measurement: Standings[Any]) -> None:
        if len(measurement.survivors) == 1:
            self.reason = Reason.DECIDED
            return
        super().add_measurement(measurement)
        if self.reason is not None:
            return
        gpu_ms, best_ms = measurement.gpu_ms, measurement.ms(measurement.best)
        if self.rules.is_out_of_time(gpu_ms, best_ms):
            self.reason = Reason.LIMIT
        elif not self._budget.affords(gpu_ms / measurement.rounds):
            self.reason = Reason.BUDGET

    def least_rounds(self, measurement: Standings[Any]) -> int:
        share = measurement.disturbed / (measurement.rounds * len(measurement.survivors))
        return self.rules.least_rounds * (_DISTURBED_FACTOR if share > _DISTURBED_SHARE else 1)
