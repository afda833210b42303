"""``sustained``: a race, then each candidate that could still win alone at its steady clock.

Where the board does not throttle, the race decides. ``sustained_run`` says why turns cannot tell.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.conclusion import build_selection, selection
from cudnn_autotune.sampling.contenders import could_win, least_ms_alone
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.search import race_again, search
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.steady_final import FinalOutcome, FinalRules, record_run, run_final
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.sustained_run import SustainedRun, is_throttled, run_alone, run_ms
from cudnn_autotune.timers.timer import Timer

# Chunks of 40 ms that the race's leader runs alone, to see whether the board throttles.
PROBE_CHUNKS = 4


@dataclass(frozen=True)
class Sustained:
    """``seed``: of the order of turns; None: another one each time."""

    name: str = "sustained"
    race_rules: RaceRules = field(default_factory=RaceRules)
    final_rules: FinalRules = field(
        default_factory=lambda: FinalRules(
            reach=1.15,
            most=8,
            first_chunks=4,
            again_chunks=6,
            rerun_margin=0.04,
            most_again=3,
            passes=3,
            confident=2.0,
            precise=0.003,
            equal=0.01,
            burst_weight=0.0,
            is_patient=True,
        )
    )
    seed: int | None = None

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        rng = random.Random(self.seed)
        found = search(candidates, timer, limits, self.race_rules, rng)
        if found is None:
            return None
        probe = probed(found, timer, 2 * PROBE_CHUNKS, self.race_rules, rng)
        if probe is None:
            return selection(found, timer, self.race_rules)
        return decided(found, probe, timer, self.race_rules, self.final_rules, rng)


def probed(
    found: SearchState,
    timer: Timer,
    chunks: int,
    rules: RaceRules,
    rng: random.Random,
) -> SustainedRun | None:
    """The leader alone, or the next best where it fails; None where that is not affordable (the
    race then decides), or where nobody is left."""
    while found.last.survivors:
        leader = found.leader
        call_ms = found.ms(leader) or 1.0
        if not found.budget.affords(run_ms(chunks, call_ms)):
            found.remarks.append("the budget left no time to see whether the board throttles")
            return None
        left_ms, excess = found.budget.left_ms(), found.cold_cache_penalty(leader)
        block = run_alone(leader, call_ms, chunks, timer, rules, left_ms, cold_cache_penalty=excess)
        if not isinstance(block, str):
            record_run(found, block, timer)
            found.sustained_ms[leader] = block.steady_ms
            return block
        found.fail(leader, block)
        race_again(found, timer, rules, rng)
    return None


def decided(
    found: SearchState,
    probe: SustainedRun,
    timer: Timer,
    race_rules: RaceRules,
    final_rules: FinalRules,
    rng: random.Random,
) -> Selection | None:
    """The race's choice where the leader held its clock, or where nobody could beat it even so;
    else that of the sustained runs. None where all have failed by now."""
    max_clock = timer.state().max_clock_mhz
    if not is_throttled(probe, max_clock):
        return selection(found, timer, race_rules)
    highest = max([*probe.clocks_mhz, *found.last.clocks_mhz, max_clock or 0.0]) or None
    contenders = could_win(found, probe.steady_ms, highest, final_rules)
    if not contenders:
        found.remarks.append("the board throttles; no contender could be faster at any clock")
        return selection(found, timer, race_rules)
    outcome = run_final(probe, contenders, found, timer, race_rules, final_rules)
    if not outcome.finalists:
        race_again(found, timer, race_rules, rng)
        return selection(found, timer, race_rules)
    found.sustained_ms.update(outcome.sustained_ms())
    if outcome.readings:
        readings = "1 reading" if outcome.readings == 1 else f"{outcome.readings} readings"
        found.remarks.append(f"times alone by {readings} of the board's power")
    best = outcome.best()
    logs = {c: math.log(found.sustained_ms[c]) for c in outcome.logs}
    near = [c for c in outcome.finalists if logs[c] - logs[best] <= final_rules.equal]
    # Where the race's leader did not keep its place, it is not given back.
    equal = [c for c in near if c != probe.candidate or c == best]
    # Of those that are as good in the long run, the fastest in turns; ties by the rule.
    in_turns = {c: found.ms(c) or math.inf for c in equal}
    fastest_ms = min(in_turns.values())
    tied = [c for c in equal if in_turns[c] <= fastest_ms * (1 + race_rules.tie_width)]
    order, rule = ties.break_ties({c: math.exp(outcome.score(c)) for c in tied})
    chosen = order[0]
    unsure = [c for c in logs if abs(logs[c] - logs[chosen]) <= 2 * outcome.error(c, chosen) + 1e-9]
    if min(logs, key=logs.__getitem__) not in tied:
        rule = "nearly as fast alone, faster in turns"
    elif len(tied) < len(equal):
        rule = "tie: faster in turns"
    bound = _regret_bound(chosen, outcome, found, highest)
    return build_selection(
        found,
        timer,
        order,
        rule,
        bound,
        race_rules,
        unsure=unsure,
        final_rules=final_rules,
    )


def _regret_bound(
    chosen: Candidate, outcome: FinalOutcome, found: SearchState, max_clock_mhz: float | None
) -> float | None:
    """How much slower than any other one the chosen one may be in the long run, relative; None
    where the budget ended the blocks.

    Against who ran alone by two standard errors; against the others by what they could be at best.
    """
    if outcome.is_out_of_time:
        found.remarks.append("the budget ended the sustained runs")
        return None
    steady_ms = outcome.sustained_ms()
    mine = math.log(steady_ms[chosen])
    leads = [
        mine - math.log(ms) + 2 * outcome.error(c, chosen)
        for c, ms in steady_ms.items()
        if c != chosen
    ]
    least_ms = least_ms_alone(found, steady_ms, max_clock_mhz)
    unknown = [mine - math.log(ms) + 2 * outcome.error(chosen) for ms in least_ms.values()]
    could_lead = [lead for lead in unknown if lead > 0]
    if could_lead:
        were = "contender was" if len(could_lead) == 1 else "contenders were"
        found.remarks.append(f"{len(could_lead)} {were} not run alone and could be faster")
    return math.expm1(max([0.0, *leads, *could_lead]))
