"""Decides when a steady-state final has had enough passes."""

from __future__ import annotations

from collections.abc import Callable

from cudnn_autotune.sampling.final_rules import FinalRules
from cudnn_autotune.sampling.steady_times import SteadyTimes
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion


class FinalCriterion(StoppingCriterion[SteadyTimes]):
    """Stops the final once the best finalist leads, or once no further pass is allowed.

    Args:
        affords_pass: returns whether the budget affords another pass of the finalists.
    """

    def __init__(self, rules: FinalRules, affords_pass: Callable[[], bool]) -> None:
        self._rules = rules
        self._affords_pass = affords_pass
        self._passes = -1

    def add_measurement(self, measurement: SteadyTimes) -> None:
        """Takes the times so far into account: once before the first further pass, then after
        each."""
        self._passes += 1
        is_over = not measurement.finalists
        if is_over or (self._passes > 0 and self._is_decided(measurement)):
            self.reason = Reason.DECIDED
        elif self._passes >= self._rules.passes:
            self.reason = Reason.LIMIT
        elif not self._affords_pass():
            self.reason = Reason.BUDGET

    def _is_decided(self, times: SteadyTimes) -> bool:
        best = times.best()
        noise = {c: times.noise(c, best) for c in times.finalists if c != best}
        return all(
            sigma <= self._rules.precise
            or times.score(c) - times.score(best) > self._rules.confident * sigma
            for c, sigma in noise.items()
        )
