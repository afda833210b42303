"""Rounds in which candidates take turns and are eliminated one after the other.

Each round runs one batch of every candidate that is still in the race. The order is random, and the
next round mirrors it, so that a drift from one batch to the next affects all alike (randomised
multiple interleaved trials: Abedi & Brecht, ICPE 2017). Rounds find the cache cold and hot by
turns: in a model an operand is partly in the cache, and the winners of the two states differ
(docs/findings/cold-and-hot.md).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.race_rules import RaceCriterion, RaceRules
from cudnn_autotune.sampling.standings import Standings
from cudnn_autotune.timers.stopping_criterion import Reason
from cudnn_autotune.timers.timer import Batch, Cache, Timer

UNDECIDED = "the race ended undecided"
"""The remark of a race that ran out of rounds or GPU time."""
_REMARKS = {Reason.LIMIT: UNDECIDED, Reason.BUDGET: "the budget ended the race"}
# Half width (log) of the confidence interval of a time that comes from one launch.
_ROUGH_HALF_WIDTH = 0.1
_MOST_WARM_UP_CALLS = 200

_Round = dict[Candidate, float]
"""Log milliseconds of each candidate in one round."""


@dataclass
class RaceOutcome(Standings[Candidate]):
    """The standings at the end of a race, and the race's observations."""

    dropped: list[tuple[Candidate, Candidate, float]] = field(default_factory=list)
    """The results of :meth:`judge`, in the order of elimination."""
    samples: dict[Candidate, int] = field(default_factory=dict)
    """Timed calls."""
    failed: dict[Candidate, str] = field(default_factory=dict)
    clocks_mhz: list[float] = field(default_factory=list)
    """Mean SM clock of each round."""
    remarks: list[str] = field(default_factory=list)

    @property
    def clock_mhz(self) -> float | None:
        """The median over the rounds of the SM clock, to which ``log_time`` belongs."""
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
        rough_ms: the candidates, all of which have run before, and the rough time of a call of each
            in milliseconds.
    """
    rules = _affordable(rules, rough_ms, budget)
    if not budget.affords(len(rules.caches) * sum(rough_ms.values())):
        rank_by_rough_times(rough_ms, outcome)
        outcome.remarks.append("the budget allowed one launch of each candidate only")
        return
    leader = min(rough_ms, key=rough_ms.__getitem__)
    calls = {
        c: min(max(1, math.ceil(rules.batch_ms / ms)), rules.most_calls)
        for c, ms in rough_ms.items()
    }
    log: dict[Cache, list[_Round]] = {cache: [] for cache in rules.caches}
    order: list[Candidate] = []
    criterion = RaceCriterion(rules, budget)
    try:
        _warm_up(leader, rough_ms[leader], timer, rules, outcome)
        while outcome.survivors and not criterion.is_finished():
            cache = rules.caches[outcome.rounds % len(rules.caches)]
            # The order is mirrored after each cache state has seen it.
            turn = outcome.rounds // len(rules.caches) % 2
            if turn == 0 and cache == rules.caches[0]:
                order = rng.sample(outcome.survivors, len(outcome.survivors))
            alive = set(outcome.survivors)
            order = [c for c in order if c in alive]
            batches = [Batch(c, calls[c], cache) for c in (order if turn == 0 else order[::-1])]
            log[cache].append(_run_round(batches, timer, outcome))
            if outcome.rounds >= len(rules.caches) and outcome.survivors:
                survivors = outcome.survivors
                groups = [np.array([[r[c] for c in survivors] for r in log[k]]) for k in log]
                outcome.dropped += outcome.judge(rules.compare(groups))
                criterion.add_measurement(outcome)
                yield
    finally:
        unjudged = [c for c in outcome.survivors if c not in outcome.log_time]
        if unjudged:  # it was closed before a round was judged
            rank_by_rough_times({c: rough_ms[c] for c in unjudged}, outcome)
        if criterion.reason in _REMARKS:
            outcome.remarks.append(_REMARKS[criterion.reason])
        # The clock may have fallen since a candidate was eliminated, so that only its distance from
        # the leader of that time is known.
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
    """Ranks candidates by their rough times where there is no time for a round."""
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


def _run_round(batches: Sequence[Batch], timer: Timer, outcome: RaceOutcome) -> _Round:
    """Runs one round, charges it to ``outcome`` and removes candidates that fail."""
    samples = timer.run(batches)
    clocks = [s.clock_mhz for s in samples if s.clock_mhz is not None and not s.error]
    if clocks:
        outcome.clocks_mhz.append(float(np.mean(clocks)))
    log_times: _Round = {}
    for batch, sample in zip(batches, samples, strict=True):
        candidate = batch.candidate
        if sample.error or not sample.time_ms > 0:
            outcome.failed[candidate] = sample.error or "no time was measured"
            outcome.survivors.remove(candidate)
            continue
        log_times[candidate] = math.log(sample.time_ms)
        outcome.samples[candidate] = outcome.samples.get(candidate, 0) + batch.calls
        outcome.gpu_ms += sample.time_ms * batch.calls
    outcome.rounds += 1
    return log_times
