"""The settings of the steady-state final, and the criterion that stops it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cudnn_autotune.sampling.steady_times import SteadyTimes
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion


@dataclass(frozen=True)
class FinalRules:
    """Says which candidates run in the steady-state final, how long, and how their times are
    weighed."""

    reach: float = 1.1
    """Largest time in the race of a contender, relative to the leader's."""
    most: int = 3
    """Most candidates in the first pass, the leader included. One more runs if one of them beats
    the leader, and one more if PyTorch's candidate is among them, so that nothing is chosen over it
    that has a longer steady time."""
    again_chunks: int = 4
    """Chunks of 40 ms of each run in a further pass."""
    rerun_margin: float = 0.02
    """Largest difference (log) to the best contender with which a candidate runs again."""
    most_again: int = 2
    """Most contenders that run again, beside the race's leader."""
    passes: int = 4
    """Most further passes, each in the reverse order of the one before."""
    confident: float = 1.0
    """Standard deviations of the noise by which the best leads when the final ends."""
    precise: float = 0.006
    """Relative noise at which the final ends as well, because a smaller gap does not matter."""
    equal: float = 0.005
    """Relative gap by which a candidate must beat the race's leader to take its place. Among
    other candidates within this of each other the time in the race decides, and in a tie there
    the rules for ties."""
    burst_weight: float = 0.1
    """The weight of log(time in the race) beside log(steady time). Both count, because in a model a
    layer shares the clock with others. With this weight a candidate that is 5 % slower in the race
    but 2 % faster in sustained runs wins."""


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
