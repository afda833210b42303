"""Who runs alone after a race, how often, and who wins in the long run.

More blocks tell more than longer ones (see ``solo``): times are averaged, and what is near the best
is measured again, in mirrored order. Even so a percent stays in the dark; there the race, which is
sharper, decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cudnn_autotune.engines import ATEN, Candidate
from cudnn_autotune.sampling.exploration import Field
from cudnn_autotune.sampling.solo import CHUNK_MS, Block, solo
from cudnn_autotune.sampling.timer import Timer

# The knobs that name a config's tile or kernel; the others (clusters, splits, workspace) leave its
# steady clock within 2 %.
_TILES = ("TILE_SIZE", "KERNEL_CFG")


def charge(found: Field, block: Block, timer: Timer) -> None:
    """Notes what a block cost, and what the board said of its clock right after it."""
    found.extra_gpu_ms += block.gpu_ms
    found.extra_samples += block.calls
    found.throttle_reasons |= dict.fromkeys(timer.state().throttle_reasons)


def could_win(
    found: Field, steady_ms: float, max_clock_mhz: float | None, reach: float
) -> list[Candidate]:
    """Rivals of the race's leader that may be faster alone, the most promising first.

    Those within ``reach`` whose optimistic time, that of the highest clock, is below
    ``steady_ms``; of each kind the fastest, since what distinguishes the power of two configs is
    their engine and tile, or their kernel.
    """
    leader_ms = found.ms(found.leader) or math.inf
    race_clock = found.last.clock_mhz
    scale = 1.0
    if race_clock and max_clock_mhz:
        scale = min(1.0, race_clock / max_clock_mhz)
    same = {found.leader.text, ATEN.text} if found.aten_is_cudnn else {found.leader.text}
    rivals = [
        c
        for c in found.raced()
        if c.text not in same
        and (ms := found.ms(c) or math.inf) < reach * leader_ms
        and ms * scale * 0.99 < steady_ms * 0.995
    ]
    seen = {_kind(found.leader)}
    firsts = []
    for candidate in rivals:
        if _kind(candidate) not in seen:
            seen.add(_kind(candidate))
            firsts.append(candidate)
    return firsts


def _kind(candidate: Candidate) -> tuple[object, ...]:
    named = tuple(candidate.knobs.get(knob) for knob in _TILES)
    return (candidate.engine, *named) if any(k is not None for k in named) else (candidate.text,)


@dataclass(frozen=True)
class SoloRules:
    """How far the solo blocks go."""

    reach: float = 1.1
    """Rivals whose time in the race is within this of the leader's take part."""
    most: int = 3
    """Candidates in the first pass, the leader included; one more where one of them beats it."""
    first_chunks: int = 3
    again_chunks: int = 3
    lag: float = 0.01
    """By so much a first block flatters the leader, whose clock still falls, against rivals, whose
    clocks still rise: only who is further behind is out."""
    within: float = 0.02
    """Of the best of the others, to be measured again with it."""
    most_again: int = 2
    """Of those, at most; and the race's leader."""
    passes: int = 2
    """Further passes at most, each in the reverse order of the one before."""
    confident: float = 1.5
    """They end once the best leads by so many standard errors."""
    equal: float = 0.01
    """Who is within this of the best in the long run is as good; the race decides among those."""
    is_patient: bool = False
    """Every block goes on until it is steady, also on a board that settles at once."""


@dataclass
class Finish:
    """The outcome of the solo blocks."""

    logs: dict[Candidate, list[float]] = field(default_factory=dict)
    """Log of the steady time, block by block."""
    clocks_mhz: dict[Candidate, float] = field(default_factory=dict)
    finalists: list[Candidate] = field(default_factory=list)

    def sustained_ms(self) -> dict[Candidate, float]:
        return {c: math.exp(float(np.mean(values))) for c, values in self.logs.items()}

    def error(self, one: Candidate, other: Candidate) -> float:
        """Standard error of the log of the ratio of two candidates."""
        return math.hypot(*(self._sigma() / math.sqrt(len(self.logs[c])) for c in (one, other)))

    def best(self) -> Candidate:
        return min(self.finalists, key=lambda c: float(np.mean(self.logs[c])))

    def _sigma(self) -> float:
        """Of one block: from those that were repeated, and no less than blocks mostly differ by."""
        repeated = [values for values in self.logs.values() if len(values) > 1]
        freedom = sum(len(values) - 1 for values in repeated)
        if not freedom:
            return _BLOCK_SIGMA
        variance = sum(float(np.var(values)) * len(values) for values in repeated) / freedom
        # A few blocks say little: the prior counts as four degrees of freedom.
        return math.sqrt((variance * freedom + 4 * _BLOCK_SIGMA**2) / (freedom + 4))


_SLOW_WITHIN = 0.2
# Standard deviation of the log of a block's steady time.
_BLOCK_SIGMA = 0.02
OUT_OF_BUDGET = "the budget ended the solo blocks"


def finish(
    probe: Block,
    rivals: Sequence[Candidate],
    found: Field,
    timer: Timer,
    rules: SoloRules,
    affords_ms: float = math.inf,
) -> Finish:
    """All rivals once; then those near the best again, until one leads or time is up.

    Args:
        probe: the block of the race's leader, which ran just before.
        rivals: the most promising first.
        affords_ms: wall time that is left.
    """
    outcome = Finish()
    spent_ms = 0.0
    # A board that took the leader to its steady clock at once will do so with the rivals.
    is_patient = rules.is_patient or not probe.settled_at_once

    def measure(candidate: Candidate, chunks: int) -> None:
        nonlocal spent_ms
        call_ms = found.ms(candidate) or 1.0
        block = solo(candidate, call_ms, chunks, timer, affords_ms - spent_ms, is_patient)
        if block is None:
            return
        charge(found, block, timer)
        spent_ms += block.gpu_ms
        keep(block)

    def keep(block: Block) -> None:
        candidate = block.candidate
        outcome.logs.setdefault(candidate, []).append(math.log(block.steady_ms))
        if block.steady_clock_mhz is not None:
            outcome.clocks_mhz[candidate] = block.steady_clock_mhz

    keep(probe)

    def affords(blocks: int, chunks: int) -> bool:
        afforded = spent_ms + blocks * chunks * CHUNK_MS <= affords_ms
        if not afforded and OUT_OF_BUDGET not in found.remarks:
            found.remarks.append(OUT_OF_BUDGET)
        return afforded

    for number, candidate in enumerate(rivals[: rules.most], start=1):
        if number == rules.most and not _is_beaten(probe.candidate, outcome, rules.equal):
            break
        if not affords(1, rules.first_chunks):
            break
        measure(candidate, rules.first_chunks)
    leader = probe.candidate
    first = {c: values[0] for c, values in outcome.logs.items()}
    order = sorted((c for c in first if c != leader), key=first.__getitem__)
    lag = _SLOW_WITHIN if is_patient else rules.lag
    if not order or first[order[0]] - first[leader] > lag:
        outcome.finalists = [leader]
        return outcome
    # On a board that settles slowly a first block may still be paying for the one before it.
    within = max(rules.within, _SLOW_WITHIN) if is_patient else rules.within
    near = [c for c in order if first[c] - first[order[0]] <= within][: rules.most_again]
    # Nobody takes the place of the race's leader on the word of one block.
    outcome.finalists = near = [*near, leader]
    for number in range(rules.passes):
        if number > 0 and _is_decided(outcome, rules.confident):
            break
        if not affords(len(near), rules.again_chunks):
            break
        for candidate in near[::-1] if number % 2 == 0 else near:
            measure(candidate, rules.again_chunks)
    if not is_patient and len(outcome.logs[leader]) > 1:
        del outcome.logs[leader][0]  # its clock came down from the race's
    return outcome


def _is_beaten(leader: Candidate, outcome: Finish, by: float) -> bool:
    logs = outcome.logs
    return any(value < logs[leader][0] - by for (value, *_) in logs.values())


def _is_decided(outcome: Finish, confident: float) -> bool:
    best = outcome.best()
    ms = outcome.sustained_ms()
    return all(
        math.log(ms[c] / ms[best]) > confident * outcome.error(c, best)
        for c in outcome.finalists
        if c != best
    )
