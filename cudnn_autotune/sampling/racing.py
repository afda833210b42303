"""Rounds in which candidates take turns and are eliminated one by one.

Each round runs one batch of every candidate that is still in the race, in mirrored random orders
(``timers.turns``). Rounds find the cache cold and hot by turns: in a model an operand is partly in
the cache, and the winners of the two states differ (docs/findings/cold-and-hot.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.statistics import Comparison, Floats, compare, expected_gain
from cudnn_autotune.sampling.strategy import Budget
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion
from cudnn_autotune.timers.timer import Batch, Cache, Sample, Timer
from cudnn_autotune.timers.turns import Mirrored, Turns

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
        """Returns an upper bound (log) of each other survivor's lead over the best. ``but`` is left
        out; ``among`` restricts the survivors."""
        best = self.log_time[self.best]
        others = (c for c in (self.survivors if among is None else among) if c != but)
        return [best - self.log_time[c] + self.half_width[c] for c in others]

    def judge(
        self, compared: Comparison, among: Sequence[K] | None = None
    ) -> list[tuple[K, K, float]]:
        """Eliminates candidates that cannot be the fastest, by a new comparison of the survivors.

        Args:
            among: the compared survivors; None: all.

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
        """Returns the survivors without a significant difference to the best one."""
        best = self.log_time[self.best]
        return [c for c in self.survivors if self.log_time[c] - best <= self.half_width[c]]

    def regret_bound(self, chosen: K, among: Collection[K] | None = None) -> float:
        """Returns an upper bound of the relative loss of ``chosen`` to the fastest.

        Args:
            among: the survivors of which the fastest may be one; None: all.
        """
        behind = self.log_time[chosen] - self.log_time[self.best]
        return max(0.0, math.expm1(behind + max([0.0, *self.leads(chosen, among)])))

    def expected_loss(self) -> float:
        """Returns an upper bound of the best's expected loss (log) to the fastest: the sum of each
        other survivor's expected gain."""
        best = self.log_time[self.best]
        behind = (self.log_time[c] - best for c in self.survivors if c != self.best)
        return sum(expected_gain(log, self.error) for log in behind)

    def interval(self, candidate: K, time_ms: float) -> tuple[float, float]:
        """Returns the confidence interval of a candidate's time, given its centre."""
        # The half width is that of a difference of two.
        spread = math.exp(self.half_width[candidate] / math.sqrt(2))
        return time_ms / spread, time_ms * spread


# A race with a successor may stop once no candidate can beat its best by more than this. Nearer
# candidates run in the next race, which distinguishes them.
_FINALISTS_WITHIN = 0.03
# Two rounds in each cache state are the least that has residuals.
_FINALISTS_ROUNDS = 4
# The share of a race's GPU time for such a race, so that both take little more time than one.
_FINALISTS_SHARE = 0.4
# If more than this share of the samples was disturbed, a few rounds may all have been hit: the
# race takes three times as many rounds at least.
_DISTURBED_SHARE = 0.02
_DISTURBED_FACTOR = 3


@dataclass(frozen=True)
class RaceRules:
    """The rules of a race: its end, the length of its batches, and the bounds of noise."""

    confidence: float = 0.95
    tie_width: float = 0.005
    """Relative lead over the best. A race that does not choose stops once no survivor can have this
    lead."""
    chooses: bool = True
    """Whether the race stops once it is clear which survivors are equal to the best, as far as that
    decides the choice."""
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
    """Milliseconds of the leader's runs before the first round, which wake the clock."""
    caches: tuple[Cache, ...] = ("cold", "hot")
    """The cache states that rounds go through by turns (docs/findings/cold-and-hot.md)."""
    least_sigma: float = 0.0015
    """Lower bound of the standard deviation of a sample's log time, as on an idle board."""
    prior_sigma: float = 0.01
    """Lower bound of the standard deviation, as on a usual board, while residuals have fewer than
    ``prior_freedom`` degrees of freedom."""
    prior_freedom: int = 12

    def for_finalists(self) -> RaceRules:
        """Returns the rules of a race that only finds the candidates of the next race."""
        return replace(
            self,
            tie_width=_FINALISTS_WITHIN,
            chooses=False,
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
    """The criterion: no survivor can beat the best by ``rules.tie_width``, or
    ``rules.most_rounds``."""

    def __init__(self, rules: RaceRules) -> None:
        self.rules = rules

    def add_measurement(self, measurement: Standings[Any]) -> None:
        if self.is_decided(measurement) and measurement.rounds >= self.least_rounds(measurement):
            self.reason = Reason.DECIDED
        else:
            is_over = measurement.rounds >= self.rules.most_rounds
            self.reason = Reason.LIMIT if is_over else None

    def is_decided(self, measurement: Standings[Any]) -> bool:
        leads = measurement.leads(but=measurement.best)
        return all(lead < self.rules.tie_width for lead in leads)

    def least_rounds(self, measurement: Standings[Any]) -> int:
        return self.rules.least_rounds


class RaceCriterion(LeadCriterion):
    """The criterion of a race without other load: the choice is clear, or one candidate is left, or
    the rules' GPU time or the budget is used up. In a race that does not choose, ``LeadCriterion``
    takes the place of a clear choice."""

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

    def is_decided(self, measurement: Standings[Any]) -> bool:
        if self.rules.chooses and isinstance(measurement, RaceOutcome):
            return measurement.is_clear()
        return super().is_decided(measurement)

    def least_rounds(self, measurement: Standings[Any]) -> int:
        share = measurement.disturbed / (measurement.rounds * len(measurement.survivors))
        return self.rules.least_rounds * (_DISTURBED_FACTOR if share > _DISTURBED_SHARE else 1)


UNDECIDED = "the race ended undecided"
"""The remark of a race that ran out of rounds or GPU time."""
# Standard errors between a candidate's distance and the width of a tie, from which on it is clear
# whether it is equal to the best.
_DOUBT = 1.5
_REMARKS = {Reason.LIMIT: UNDECIDED, Reason.BUDGET: "the budget ended the race"}
# Half width (log) of the confidence interval of one launch's time.
_ROUGH_HALF_WIDTH = 0.1
_MOST_WARM_UP_CALLS = 200


@dataclass
class RaceOutcome(Standings[Candidate]):
    """The standings at the end of a race, and the race's observations."""

    pytorchs: str = ""
    """Text of the candidate that PyTorch would run."""
    dropped: list[tuple[Candidate, Candidate, float]] = field(default_factory=list)
    """The results of :meth:`judge`, in the order of elimination."""
    samples: dict[Candidate, int] = field(default_factory=dict)
    """Timed calls."""
    failed: dict[Candidate, str] = field(default_factory=dict)
    clocks_mhz: list[float] = field(default_factory=list)
    """Mean SM clock of each round."""
    remarks: list[str] = field(default_factory=list)

    def is_clear(self) -> bool:
        """Returns whether more rounds would hardly change which candidate is chosen: the first one,
        in the order of preference, that is equal to the best."""
        width, doubt = ties.width(self.error), _DOUBT * self.error
        best = self.log_time[self.best]
        for one in sorted(self.survivors, key=lambda c: ties.preference(c, self.pytorchs)):
            behind = self.log_time[one] - best
            if behind <= width - doubt:
                return True
            if behind <= width + doubt:
                return False
        return True

    def add_round(self, samples: Mapping[str, Sample], calls: Mapping[Candidate, int]) -> None:
        """Counts a round's samples, by candidate's text; failed candidates have none."""
        clocks = [s.clock_mhz for s in samples.values() if s.clock_mhz is not None]
        if clocks:
            self.clocks_mhz.append(float(np.mean(clocks)))
        for candidate, count in calls.items():
            if (sample := samples.get(candidate.text)) is not None:
                self.samples[candidate] = self.samples.get(candidate, 0) + count
                self.gpu_ms += sample.time_ms * count
        self.rounds += 1

    @property
    def clock_mhz(self) -> float | None:
        """The median SM clock over the rounds, to which ``log_time`` belongs."""
        return float(np.median(self.clocks_mhz)) if self.clocks_mhz else None


def race(
    outcome: RaceOutcome,
    rough_ms: dict[Candidate, float],
    timer: Timer,
    budget: Budget,
    rules: RaceRules,
    rng: random.Random,
) -> Iterator[None]:
    """Races candidates until the criterion of ``rules`` ends it; each step is a round.

    Args:
        outcome: the result, which is complete once the iterator has ended or is closed.
        rough_ms: the candidates, which have all run before, with rough milliseconds of a call.
    """
    rules = _affordable(rules, rough_ms, budget)
    if not budget.affords(len(rules.caches) * sum(rough_ms.values())):
        rank_by_rough_times(rough_ms, outcome)
        outcome.remarks.append("the budget allowed one launch of each candidate only")
        return
    leader = min(rough_ms, key=rough_ms.__getitem__)
    schedule = Mirrored(lambda some: rng.sample(some, len(some)), len(rules.caches))
    rough = {c.text: ms for c, ms in rough_ms.items()}
    turns = Turns(timer, schedule, rough, rules.most_calls)
    log: dict[Cache, list[dict[str, Sample]]] = {cache: [] for cache in rules.caches}
    criterion = RaceCriterion(rules, budget)
    try:
        _warm_up(leader, rough_ms[leader], timer, rules, outcome)
        while outcome.survivors and not criterion.is_finished():
            cache = rules.caches[outcome.rounds % len(rules.caches)]
            order = turns.next_order(outcome.survivors)
            samples = turns.round(order, cache, rules.batch_ms)
            log[cache].append(samples)
            outcome.add_round(samples, {c: turns.calls(c, rules.batch_ms) for c in order})
            for candidate in order:
                if candidate.text in turns.failed:
                    outcome.failed[candidate] = turns.failed[candidate.text]
                    outcome.survivors.remove(candidate)
            if outcome.rounds >= len(rules.caches) and outcome.survivors:
                survivors = outcome.survivors
                groups = [
                    np.array([[math.log(r[c.text].time_ms) for c in survivors] for r in rounds])
                    for rounds in log.values()
                ]
                outcome.dropped += outcome.judge(rules.compare(groups))
                criterion.add_measurement(outcome)
                yield
    finally:
        unjudged = [c for c in outcome.survivors if c not in outcome.log_time]
        if unjudged:  # it was closed before a round was judged
            rank_by_rough_times({c: rough_ms[c] for c in unjudged}, outcome)
        if criterion.reason in _REMARKS:
            outcome.remarks.append(_REMARKS[criterion.reason])
        # The clock may have fallen since an elimination: only the candidate's distance from its
        # leader is known.
        for candidate, leader, behind in reversed(outcome.dropped):
            outcome.log_time[candidate] = outcome.log_time[leader] + behind


def _affordable(rules: RaceRules, rough_ms: dict[Candidate, float], budget: Budget) -> RaceRules:
    """Shortens the batches if the budget does not allow a few rounds of the usual length."""
    if not budget.is_limited:
        return rules
    left_ms = max(0.0, budget.left_ms())
    batch_ms = left_ms / (rules.least_rounds * len(rough_ms))
    return replace(
        rules,
        batch_ms=max(0.01, min(rules.batch_ms, batch_ms)),
        warm_ms=min(rules.warm_ms, 0.1 * left_ms),
    )


def rank_by_rough_times(rough_ms: dict[Candidate, float], outcome: RaceOutcome) -> None:
    """Ranks candidates by their rough times if there is no time for a round."""
    for candidate, ms in rough_ms.items():
        outcome.log_time[candidate] = math.log(ms)
        outcome.half_width[candidate] = _ROUGH_HALF_WIDTH
        outcome.samples[candidate] = 0
    outcome.error = _ROUGH_HALF_WIDTH / 2


def _warm_up(
    leader: Candidate, rough_ms: float, timer: Timer, rules: RaceRules, outcome: RaceOutcome
) -> None:
    calls = min(int(rules.warm_ms / max(rough_ms, 1e-3)), _MOST_WARM_UP_CALLS)
    if calls < 1:
        return
    for sample in timer.run([Batch(leader, calls, "hot")]):
        if not sample.error:
            outcome.gpu_ms += sample.time_ms * calls
