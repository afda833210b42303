"""Rounds in which candidates take turns, and lose one after the other.

Each round runs one batch of every candidate still in the race, in random order, the next round in
the mirrored order: what drifts from one batch to the next then weighs on all alike (randomised
multiple interleaved trials: Abedi & Brecht, ICPE 2017). Rounds find the cache cold and hot by
turns: in a model an operand is partly in the cache, and the winners of the two states differ
(``docs/findings/cold-and-hot.md``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.statistics import Comparison, Floats, compare, shrunk_medians
from cudnn_autotune.sampling.ties import TIE_WIDTH
from cudnn_autotune.timers.timer import Batch, Cache, Timer

UNDECIDED = "the race ended undecided"
"""The remark of a race that ran out of rounds or time."""
# Share of disturbed samples from which on a race runs longer.
_DISTURBED_SHARE = 0.02
# A race that another follows may stop once nobody can beat its best by more than this: whoever is
# nearer gets into the next, which tells.
_FINALISTS_WITHIN = 0.03
# Two rounds in each cache state: the least that has residuals.
_FINALISTS_ROUNDS = 4
# Of a race's GPU time; the two together shall take little more than one.
_FINALISTS_SHARE = 0.4


@dataclass(frozen=True)
class RaceRules:
    """When a race drops a candidate, and when it stops."""

    confidence: float = 0.95
    tie_width: float = TIE_WIDTH
    """The race stops once no candidate left can beat the best by more than this."""
    least_rounds: int = 6
    most_rounds: int = 40
    batch_ms: float = 0.7
    most_calls: int = 64
    """In a batch; for very short calls it ends before ``batch_ms``."""
    gpu_ms: float = 100.0
    """GPU time after which the race stops, decided or not; for slow calls later,"""
    gpu_calls: int = 250
    """once it took what so many calls of the fastest would,"""
    most_gpu_ms: float = 400.0
    """but never after this."""
    warm_ms: float = 10.0
    """Of the leader, before the first round: the clock leaves its idle state."""
    caches: tuple[Cache, ...] = ("cold", "hot")
    least_sigma: float = 0.0015
    """Standard deviation of a sample's log time that noise is never believed to be below: that of
    batches on a quiet board."""
    prior_sigma: float = 0.01
    """Nor below this, a usual board's, while there are few residuals:"""
    prior_freedom: int = 12
    """so many degrees of freedom make them believable."""

    def for_finalists(self) -> RaceRules:
        """Of a race that another follows: it need only find who takes part in that."""
        return replace(
            self,
            tie_width=_FINALISTS_WITHIN,
            least_rounds=_FINALISTS_ROUNDS,
            gpu_ms=_FINALISTS_SHARE * self.gpu_ms,
            gpu_calls=int(_FINALISTS_SHARE * self.gpu_calls),
        )

    def is_out_of_time(self, gpu_ms: float, best_ms: float) -> bool:
        limit_ms = min(self.gpu_calls * best_ms, self.most_gpu_ms)
        return gpu_ms > max(self.gpu_ms, limit_ms)

    def compare(self, groups: Sequence[Floats]) -> Comparison:
        """What rounds say; see ``statistics.compare``."""
        return compare(
            groups,
            delta=1 - self.confidence,
            least_sigma=self.least_sigma,
            prior_sigma=self.prior_sigma,
            prior_freedom=self.prior_freedom,
        )


@dataclass
class RaceOutcome:
    """A race's log, candidate by candidate."""

    survivors: list[Candidate] = field(default_factory=list)
    log_time: dict[Candidate, float] = field(default_factory=dict)
    """Log milliseconds at the clock of the last rounds."""
    dropped: list[tuple[Candidate, Candidate, float]] = field(default_factory=list)
    """In their order: who, who led then, and by how much (log)."""
    half_width: dict[Candidate, float] = field(default_factory=dict)
    """Of the difference (log) to any other one, when it was last judged."""
    samples: dict[Candidate, int] = field(default_factory=dict)
    failed: dict[Candidate, str] = field(default_factory=dict)
    rounds: int = 0
    gpu_ms: float = 0.0
    cold_cache_penalty: dict[Candidate, float] = field(default_factory=dict)
    """How much more (log) the mean of both cache states takes than a hot one, beyond what it does
    of the best one, as far as that is more than noise."""
    clocks_mhz: list[float] = field(default_factory=list)
    """Batch by batch."""
    round_clocks_mhz: list[float] = field(default_factory=list)
    """Means of the rounds: the later ones have fewer batches."""
    disturbed: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def best(self) -> Candidate:
        return min(self.survivors, key=self.log_time.__getitem__)

    @property
    def clock_mhz(self) -> float | None:
        return float(np.median(self.clocks_mhz)) if self.clocks_mhz else None

    @property
    def median_round_mhz(self) -> float | None:
        """The clock that ``mu`` goes with."""
        return float(np.median(self.round_clocks_mhz)) if self.round_clocks_mhz else None

    def ms(self, candidate: Candidate) -> float:
        return math.exp(self.log_time[candidate])

    def lead(self, candidate: Candidate) -> float:
        """By how much (log) a survivor may be faster than the best at most."""
        return self.log_time[self.best] - self.log_time[candidate] + self.half_width[candidate]


def race(
    rough_ms: dict[Candidate, float],
    timer: Timer,
    budget: Budget,
    rules: RaceRules,
    rng: random.Random,
) -> RaceOutcome:
    """Races candidates that have run before, with a rough time each (milliseconds)."""
    outcome = RaceOutcome(survivors=list(rough_ms))
    rules = _affordable(rules, rough_ms, budget)
    if not budget.affords(len(rules.caches) * sum(rough_ms.values())):
        return _by_rough_times(rough_ms, outcome)
    leader = min(rough_ms, key=rough_ms.__getitem__)
    _warm(leader, rough_ms[leader], timer, rules, outcome)
    calls = {
        c: min(max(1, math.ceil(rules.batch_ms / ms)), rules.most_calls)
        for c, ms in rough_ms.items()
    }
    log: dict[Cache, list[dict[Candidate, float]]] = {cache: [] for cache in rules.caches}
    order: list[Candidate] = []
    while outcome.survivors:
        cache = rules.caches[outcome.rounds % len(rules.caches)]
        # Mirrored after each cache state has seen the order.
        turn = outcome.rounds // len(rules.caches) % 2
        if turn == 0 and cache == rules.caches[0]:
            order = rng.sample(outcome.survivors, len(outcome.survivors))
        alive = set(outcome.survivors)
        order = [c for c in order if c in alive]
        _round(order if turn == 0 else order[::-1], calls, cache, timer, outcome, log[cache])
        if outcome.rounds < len(rules.caches) or not outcome.survivors:
            continue
        _judge(outcome, log, rules)
        if _is_over(outcome, budget, rules):
            break
    _note_cold_cache_penalty(outcome, log)
    # The clock may have fallen since they were dropped: their distance from who led then stands.
    for candidate, leader, behind in reversed(outcome.dropped):
        outcome.log_time[candidate] = outcome.log_time[leader] + behind
    return outcome


def _affordable(rules: RaceRules, rough_ms: dict[Candidate, float], budget: Budget) -> RaceRules:
    """Shorter batches where the budget does not allow a few rounds of the usual ones."""
    if not budget.is_limited:
        return rules
    left_ms = max(0.0, budget.left_ms())
    batch_ms = left_ms / (rules.least_rounds * len(rough_ms))
    return replace(
        rules,
        batch_ms=max(0.01, min(rules.batch_ms, batch_ms)),
        warm_ms=min(rules.warm_ms, 0.1 * left_ms),
    )


# What one launch by itself is good for, relative.
_ROUGH_HALF_WIDTH = 0.1


def _by_rough_times(rough_ms: dict[Candidate, float], outcome: RaceOutcome) -> RaceOutcome:
    """No time for a round: one launch of each has to do."""
    for candidate, ms in rough_ms.items():
        outcome.log_time[candidate] = math.log(ms)
        outcome.half_width[candidate] = _ROUGH_HALF_WIDTH
        outcome.samples[candidate] = 0
    outcome.remarks.append("the budget allowed one launch of each candidate only")
    return outcome


def _warm(
    leader: Candidate, rough_ms: float, timer: Timer, rules: RaceRules, outcome: RaceOutcome
) -> None:
    calls = min(int(rules.warm_ms / max(rough_ms, 1e-3)), 200)
    if calls < 1:
        return
    for sample in timer.run([Batch(leader, calls, "hot")]):
        if not sample.error:
            outcome.gpu_ms += sample.time_ms * calls


def _round(
    order: Sequence[Candidate],
    calls: dict[Candidate, int],
    cache: Cache,
    timer: Timer,
    outcome: RaceOutcome,
    log: list[dict[Candidate, float]],
) -> None:
    samples = timer.run([Batch(c, calls[c], cache) for c in order])
    clocks = [s.clock_mhz for s in samples if s.clock_mhz is not None and not s.error]
    outcome.clocks_mhz += clocks
    if clocks:
        outcome.round_clocks_mhz.append(float(np.mean(clocks)))
    entry: dict[Candidate, float] = {}
    for candidate, sample in zip(order, samples, strict=True):
        if sample.error or not sample.time_ms > 0:
            outcome.failed[candidate] = sample.error or "no time was measured"
            outcome.survivors.remove(candidate)
            continue
        entry[candidate] = math.log(sample.time_ms)
        outcome.samples[candidate] = outcome.samples.get(candidate, 0) + calls[candidate]
        outcome.gpu_ms += sample.time_ms * calls[candidate]
    log.append(entry)
    outcome.rounds += 1


def _judge(
    outcome: RaceOutcome, log: dict[Cache, list[dict[Candidate, float]]], rules: RaceRules
) -> None:
    """Updates every survivor's standing and drops those that cannot be the fastest."""
    alive = list(outcome.survivors)
    judged = rules.compare(
        [np.array([[entry[c] for c in alive] for entry in rounds]) for rounds in log.values()]
    )
    best = judged.log_time[judged.best]
    for candidate, mu, is_out in zip(alive, judged.log_time, judged.is_out, strict=True):
        outcome.log_time[candidate] = float(mu)
        outcome.half_width[candidate] = judged.half_width
        if is_out:
            outcome.survivors.remove(candidate)
            outcome.dropped.append((candidate, alive[judged.best], float(mu - best)))
    outcome.disturbed = judged.disturbed


def _note_cold_cache_penalty(
    outcome: RaceOutcome, log: dict[Cache, list[dict[Candidate, float]]]
) -> None:
    """Against the best, which took part in all rounds: what came between the two of a pair, as a
    clock that falls, weighs on both alike."""
    if not outcome.survivors or not {"cold", "hot"} <= log.keys():
        return
    best = outcome.best
    beyond: dict[Candidate, list[float]] = {}
    for cold, hot in zip(log["cold"], log["hot"], strict=False):
        of_best = cold[best] - hot[best]
        for candidate, log_ms in cold.items():
            if candidate in hot and candidate != best:
                more = log_ms - hot[candidate] - of_best
                beyond.setdefault(candidate, []).append(more)
    outcome.cold_cache_penalty[best] = 0.0
    for candidate, more in zip(beyond, shrunk_medians(list(beyond.values())), strict=True):
        outcome.cold_cache_penalty[candidate] = more / 2


def _is_over(outcome: RaceOutcome, budget: Budget, rules: RaceRules) -> bool:
    if len(outcome.survivors) == 1:
        return True
    best = outcome.best
    # Where something disturbs the GPU now and then, a few rounds may all have been hit.
    share = outcome.disturbed / (outcome.rounds * len(outcome.survivors))
    least = rules.least_rounds * (3 if share > _DISTURBED_SHARE else 1)
    if outcome.rounds >= least and all(
        outcome.lead(c) < rules.tie_width for c in outcome.survivors if c != best
    ):
        return True
    is_out_of_time = rules.is_out_of_time(outcome.gpu_ms, outcome.ms(best))
    if outcome.rounds >= rules.most_rounds or is_out_of_time:
        outcome.remarks.append(UNDECIDED)
        return True
    round_ms = outcome.gpu_ms / outcome.rounds
    if not budget.affords(round_ms):
        outcome.remarks.append("the budget ended the race")
        return True
    return False
