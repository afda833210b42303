"""``sustained``: a race, then each candidate that could still win alone at its steady clock.

Where the board does not throttle, the race decides. See ``solo`` for why turns cannot tell.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.exploration import Field, explore, selection, told
from cudnn_autotune.sampling.finals import (
    OUT_OF_BUDGET,
    SoloRules,
    charge,
    could_win,
    finish,
)
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.selection import Selection
from cudnn_autotune.sampling.solo import CHUNK_MS, Block, is_throttled, solo
from cudnn_autotune.sampling.strategy import Candidates, Limits
from cudnn_autotune.sampling.timer import Timer

# Chunks of 40 ms that the race's leader runs alone, to see whether the board throttles.
PROBE_CHUNKS = 3


@dataclass(frozen=True)
class Sustained:
    """``seed``: of the order of turns; None: another one each time."""

    name: str = "sustained"
    race_rules: RaceRules = field(default_factory=RaceRules)
    solo_rules: SoloRules = field(
        default_factory=lambda: SoloRules(
            reach=1.15,
            most=8,
            first_chunks=4,
            again_chunks=6,
            within=0.04,
            most_again=3,
            passes=3,
            confident=2.0,
            is_patient=True,
        )
    )
    seed: int | None = None

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        rng = random.Random(self.seed)
        found = explore(candidates, timer, limits, self.race_rules, rng)
        if found is None:
            return None
        budget = Budget(timer, limits)
        probe = probed(found, timer, budget, 2 * PROBE_CHUNKS)
        if probe is None:
            return selection(found, timer, self.race_rules)
        return decided(found, probe, timer, budget, self.race_rules, self.solo_rules)


def probed(found: Field, timer: Timer, budget: Budget, chunks: int) -> Block | None:
    """The leader alone; None where that is not affordable or fails (the race then decides)."""
    if not budget.affords(chunks * CHUNK_MS):
        found.remarks.append("the budget left no time to see whether the board throttles")
        return None
    leader = found.leader
    block = solo(leader, found.ms(leader) or 1.0, chunks, timer, budget.left_ms())
    if block is None:
        found.remarks.append("the leader failed when it ran alone")
        return None
    charge(found, block, timer)
    found.sustained_ms[leader] = block.steady_ms
    return block


def decided(
    found: Field,
    probe: Block,
    timer: Timer,
    budget: Budget,
    race_rules: RaceRules,
    solo_rules: SoloRules,
) -> Selection:
    """The race's choice where the leader held its clock, or where nobody could beat it even so;
    else that of the solo blocks."""
    max_clock = timer.state().max_clock_mhz
    if not is_throttled(probe, max_clock):
        return selection(found, timer, race_rules, probe.steady_clock_mhz)
    highest = max([*probe.clocks_mhz, *found.last.clocks_mhz, max_clock or 0.0])
    rivals = could_win(found, probe.steady_ms, highest or None, solo_rules.reach)
    if not rivals:
        found.remarks.append("the board throttles; no rival could be faster at any clock")
        return selection(found, timer, race_rules, probe.steady_clock_mhz)
    outcome = finish(probe, rivals, found, timer, solo_rules, budget.left_ms())
    found.sustained_ms.update(outcome.sustained_ms())
    logs = {c: math.log(found.sustained_ms[c]) for c in outcome.logs}
    best = outcome.best()
    equal = [c for c in outcome.finalists if logs[c] - logs[best] <= solo_rules.equal]
    # Of those that are as good in the long run, the fastest in turns; ties by the rule.
    in_turns = {c: found.ms(c) or math.inf for c in equal}
    fastest_ms = min(in_turns.values())
    tied = [c for c in equal if in_turns[c] <= fastest_ms * (1 + race_rules.tie_width)]
    chosen = ties.order(tied)[0]
    unsure = [
        c for c, value in logs.items() if value - logs[best] <= 2 * outcome.error(c, best) + 1e-9
    ]
    others = [
        logs[chosen] - value + 2 * outcome.error(c, chosen)
        for c, value in logs.items()
        if c != chosen
    ]
    # Of rivals that the budget left out nothing is known.
    is_whole = OUT_OF_BUDGET not in found.remarks
    return told(
        found,
        timer,
        tied,
        math.expm1(max([0.0, *others])) if is_whole else None,
        race_rules,
        sustained_clock_mhz=outcome.clocks_mhz.get(chosen),
        unsure=unsure,
        rule="tie: faster in turns" if len(tied) < len(equal) else None,
    )
