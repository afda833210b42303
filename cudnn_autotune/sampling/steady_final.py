"""Who runs alone after a race, how often, and who wins in the long run.

More blocks tell more than longer ones (see ``solo``): times are averaged, and what is near the best
is measured again, in mirrored order. Even so a percent stays in the dark; there the race, which is
sharper, decides: the standing of a candidate is ``log(time alone) + w log(time in the race)``, and
the race's leader has a small start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.sustained_run import (
    FAR_READING_SIGMA,
    RUN_SIGMA,
    SustainedRun,
    run_alone,
    run_ms,
)
from cudnn_autotune.timers.timer import Timer


def record_run(found: SearchState, block: SustainedRun, timer: Timer) -> None:
    """Notes what a block said and cost, and what the board said of its clock right after it.

    The steady clock is not that of a block far from the limit.
    """
    if block.steady_clock_mhz is not None and not block.is_far:
        found.sustained_clock_mhz[block.candidate] = block.steady_clock_mhz
    found.extra_gpu_ms += block.gpu_ms
    found.extra_samples += block.calls
    found.throttle_reasons |= dict.fromkeys(timer.state().throttle_reasons)


@dataclass(frozen=True)
class FinalRules:
    """How far the sustained runs go."""

    reach: float = 1.1
    """Rivals whose time in the race is within this of the leader's take part."""
    most: int = 3
    """Candidates in the first pass, the leader included; one more where one of them beats it, and
    one more where what PyTorch would run is among them: nothing is taken that is slower alone."""
    first_chunks: int = 4
    again_chunks: int = 4
    """Of 40 ms: in nine of ten blocks of 160 ms an H200's power is read (``board_power``)."""
    first_run_bias: float = 0.02
    """By so much a first block flatters the leader, whose clock still falls, against contenders,
    whose clocks still rise: only who is further behind is out."""
    rerun_margin: float = 0.02
    """Of the best of the others, to be measured again with it."""
    most_again: int = 2
    """Of those, at most; and the race's leader."""
    passes: int = 4
    """Further passes at most, each in the reverse order of the one before."""
    confident: float = 1.0
    """They end once the best leads by so many standard deviations of the noise,"""
    precise: float = 0.006
    """or once the noise is no more than this: what is left does not matter."""
    equal: float = 0.005
    """The race's leader keeps its place unless somebody beats it by more than this; of others so
    near to one another, the race decides, and where that calls it a tie the rules for ties."""
    burst_weight: float = 0.1
    """What a percent in the race counts for beside one alone. A layer is seldom alone, so that the
    clock is not all its own; but who is 5 % slower in turns and 2 % faster alone is to be taken."""
    is_patient: bool = False
    """Every block goes on until it is steady, also on a board that settles at once."""


class SteadyLog(NamedTuple):
    """What a block says: the log of the steady time."""

    value: float
    sigma: float = RUN_SIGMA
    """Its standard deviation."""
    readings: int = 0
    """Of the board's power, that it rests on."""


@dataclass
class FinalOutcome:
    """The outcome of the sustained runs."""

    handicaps: dict[Candidate, float] = field(default_factory=dict)
    """What is added to the log of its time: for what it loses in the race, and for not being the
    race's leader."""
    logs: dict[Candidate, list[SteadyLog]] = field(default_factory=dict)
    """Block by block; of those that did not fail."""
    finalists: list[Candidate] = field(default_factory=list)
    is_out_of_time: bool = False
    """Whether the budget left out a block that was wanted."""
    prior_sigma: float = RUN_SIGMA
    """By so much blocks without a reading differ, as far as those that were repeated do not know
    better."""

    @property
    def readings(self) -> int:
        """Of the board's power, that the times rest on."""
        return sum(block.readings for blocks in self.logs.values() for block in blocks)

    def sustained_ms(self) -> dict[Candidate, float]:
        return {c: math.exp(self._mean(c)) for c in self.logs}

    def noise(self, *candidates: Candidate) -> float:
        """Of the standard error of the log of one candidate's time, or of the ratio of two, what
        more blocks would bring down."""
        scale = self._scale()
        return math.hypot(*(scale / math.sqrt(_weights(self.logs[c]).sum()) for c in candidates))

    def error(self, *candidates: Candidate) -> float:
        """Standard error of the log of one candidate's time, or of the ratio of two."""
        by_power = (_POWER_ERROR for c in candidates if _is_read(self.logs[c]))
        return math.hypot(self.noise(*candidates), *by_power)

    def score(self, candidate: Candidate) -> float:
        """The less the better."""
        return self._mean(candidate) + self.handicaps.get(candidate, 0.0)

    def doubt(self, candidate: Candidate) -> float:
        """How much less sure its standing is than that of the surest."""
        return self.noise(candidate) - min(self.noise(c) for c in self.logs)

    def best(self) -> Candidate:
        return min(self.finalists, key=self.score)

    def _mean(self, candidate: Candidate) -> float:
        """Weighted; but where the power was not read, without the worst of three or more, whose
        clock was still paying for another's block: once all finalists have three, since the best
        of two against the best two of three would be no fair comparison."""
        blocks = self.logs[candidate]
        contenders = [self.logs.get(c, ()) for c in self.finalists]
        is_trimmed = len(blocks) >= _TRIMMED_FROM and all(
            len(others) >= _TRIMMED_FROM and not _is_read(others) for others in contenders
        )
        kept = sorted(blocks)[:-1] if is_trimmed else blocks
        return float(np.average([b.value for b in kept], weights=_weights(kept)))

    def _scale(self) -> float:
        """By how much blocks differ more, or less, than their sigmas say: from those that were
        repeated. A few blocks say little: the prior counts as four degrees of freedom."""
        squares, freedom = _PRIOR_FREEDOM * (self.prior_sigma / RUN_SIGMA) ** 2, _PRIOR_FREEDOM
        for blocks in self.logs.values():
            values, weights = np.array([b.value for b in blocks]), _weights(blocks)
            squares += float(weights @ (values - np.average(values, weights=weights)) ** 2)
            freedom += len(blocks) - 1
        return math.sqrt(squares / freedom)


def _is_read(blocks: Sequence[SteadyLog]) -> bool:
    """Whether the power was read in some of them, near its limit or often."""
    return any(b.sigma < FAR_READING_SIGMA for b in blocks)


def _weights(blocks: Sequence[SteadyLog]) -> npt.NDArray[np.float64]:
    return np.array([b.sigma**-2 for b in blocks])


# On a board that settles slowly a first block says little: it may still be paying, or be paid, for
# the one before it. So far apart it is believed all the same.
_SLOW_WITHIN = 0.2
_TRIMMED_FROM = 3
_PRIOR_FREEDOM = 4
# Of a board whose clock is not held back: pairs of long blocks have standard errors of 0.02 to
# 0.3 % (31 layers on an H200, in the records of benchmarks/audit_layers.py).
_FREE_SIGMA = 0.003
# By so much times at the limit, from however many blocks, differ from those of long blocks
# (docs/findings/power-limit.md).
_POWER_ERROR = 0.0065


def run_final(
    probe: SustainedRun,
    contenders: Sequence[Candidate],
    found: SearchState,
    timer: Timer,
    race_rules: RaceRules,
    rules: FinalRules,
) -> FinalOutcome:
    """All contenders once; then those near the best again, until one leads or time is up.

    Who fails is out, and the next takes its place; where all fail, there are no finalists.

    Args:
        probe: the block of the race's leader, which ran just before.
        contenders: as ``contenders.could_win`` orders them.
    """
    leader = probe.candidate
    leader_ms = found.ms(leader) or probe.steady_ms
    outcome = FinalOutcome(
        {
            c: rules.burst_weight * math.log((found.ms(c) or leader_ms) / leader_ms) + rules.equal
            for c in contenders
        }
    )
    # A board that took the leader to its steady clock at once will do so with the contenders.
    is_patient = rules.is_patient or not probe.settled_at_once
    reports_throttling = timer.state().reports_throttling

    def keep(block: SustainedRun) -> None:
        told = SteadyLog(math.log(block.steady_ms), block.sigma, len(block.at_limit_ms))
        outcome.logs.setdefault(block.candidate, []).append(told)
        is_held = bool(outcome.readings or found.throttle_reasons.keys() - {"gpu_idle"})
        is_free = reports_throttling and not is_patient and not is_held
        outcome.prior_sigma = _FREE_SIGMA if is_free else RUN_SIGMA

    keep(probe)

    def measure(candidate: Candidate, chunks: int) -> None:
        call_ms, left_ms = found.ms(candidate) or 1.0, found.budget.left_ms()
        excess = found.cold_cache_penalty(candidate)
        block = run_alone(
            candidate, call_ms, chunks, timer, race_rules, left_ms, is_patient, excess
        )
        if isinstance(block, str):
            found.fail(candidate, block)
            outcome.logs.pop(candidate, None)
        else:
            record_run(found, block, timer)
            keep(block)

    # Blocks are as long as their calls take in the race, where the clock is higher.
    slower = max(1.0, probe.steady_ms / leader_ms)

    def affords(candidates: Sequence[Candidate], chunks: int) -> bool:
        wanted = sum(slower * run_ms(chunks, found.ms(c) or 1.0) for c in candidates)
        afforded = found.budget.affords(wanted)
        outcome.is_out_of_time |= not afforded
        return afforded

    most = rules.most + any(c.text == found.pytorchs for c in contenders)
    for candidate in contenders:
        more = _is_beaten(leader, outcome, rules.equal)
        if len(outcome.logs) >= most + more or not affords([candidate], rules.first_chunks):
            break
        measure(candidate, rules.first_chunks)
    # Where some blocks are less sure than others: at worst, and at best.
    worst = {c: outcome.score(c) + outcome.doubt(c) for c in outcome.logs}
    least = {c: outcome.score(c) - outcome.doubt(c) for c in outcome.logs}
    order = sorted((c for c in worst if c != leader), key=worst.__getitem__)
    first_run_bias = _SLOW_WITHIN if is_patient else rules.first_run_bias
    if not order or min(least[c] for c in order) - worst[leader] > first_run_bias:
        outcome.finalists = [leader]
        return outcome
    within = max(rules.rerun_margin, _SLOW_WITHIN) if is_patient else rules.rerun_margin

    def near() -> list[Candidate]:
        """Nobody takes the place of the race's leader on the word of one block."""
        left = [c for c in order if c in outcome.logs]
        best = [c for c in left if least[c] - worst[left[0]] <= within]
        return [*best[: rules.most_again], *(c for c in [leader] if c in outcome.logs)]

    outcome.finalists = near()
    for number in range(rules.passes):
        if number > 0 and _is_decided(outcome, rules):
            break
        if not affords(outcome.finalists, rules.again_chunks):
            break
        turn = outcome.finalists
        for candidate in turn[::-1] if number % 2 == 0 else turn:
            measure(candidate, rules.again_chunks)
        is_told_twice = len(outcome.logs.get(leader, ())) > 1
        if number == 0 and not is_patient and is_told_twice and not probe.at_limit_ms:
            del outcome.logs[leader][0]  # its clock came down from the race's
        outcome.finalists = near()
        if not outcome.finalists:
            break
    return outcome


def _is_beaten(leader: Candidate, outcome: FinalOutcome, by: float) -> bool:
    """By time alone: the order turns, and others may do still better."""
    logs = outcome.logs
    return any(first.value < logs[leader][0].value - by for (first, *_) in logs.values())


def _is_decided(outcome: FinalOutcome, rules: FinalRules) -> bool:
    best = outcome.best()
    noise = {c: outcome.noise(c, best) for c in outcome.finalists if c != best}
    return all(
        sigma <= rules.precise or outcome.score(c) - outcome.score(best) > rules.confident * sigma
        for c, sigma in noise.items()
    )
