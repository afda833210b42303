"""Decides when a race has had enough rounds."""

from __future__ import annotations

from typing import Any

from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.race_rules import RaceRules
from cudnn_autotune.sampling.standings import Standings
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion

# Where more than this share of the samples was disturbed, a few rounds may all have been hit: the
# race takes three times as many rounds at least.
_DISTURBED_SHARE = 0.02
_DISTURBED_FACTOR = 3


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
