"""The choice that races and sustained runs lead to, with its evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.budget import left_unseen
from cudnn_autotune.sampling.racing import UNDECIDED, RaceRules
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.steady_final import FinalRules
from cudnn_autotune.timers.timer import Timer


def selection(found: SearchState, timer: Timer, rules: RaceRules) -> Selection | None:
    """The choice by the races alone; None where nobody is left to choose."""
    last = found.last
    if not last.survivors:
        return None
    best = last.log_time[last.best]
    behind_best = {c: last.log_time[c] - best for c in last.survivors}
    tied = [c for c, behind in behind_best.items() if behind <= rules.tie_width]
    unsure = [c for c, behind in behind_best.items() if behind <= last.half_width[c]]
    order, rule = ties.break_ties({c: last.ms(c) for c in tied})
    first = order[0]
    # Against the best by mu, every contender's lead is known; the chosen one may trail it by a tie.
    others = [last.lead(c) for c in last.survivors if c not in (first, last.best)]
    behind = last.log_time[first] - best
    bound = behind + max([0.0, *others])
    if first != last.best:
        bound = max(bound, behind + last.half_width[first])
    return build_selection(
        found, timer, order, rule, max(0.0, math.expm1(bound)), rules, unsure=unsure
    )


def build_selection(
    found: SearchState,
    timer: Timer,
    tied: Sequence[Candidate],
    rule: str,
    regret_bound: float | None,
    rules: RaceRules,
    unsure: Sequence[Candidate] = (),
    final_rules: FinalRules | None = None,
) -> Selection:
    """The selection with its evidence: the tied first, then the others as they finished.

    It claims no bound where some candidate was not compared (``SearchState.is_judged``).

    Args:
        tied: those within the tie width of the fastest, the chosen one first.
        rule: what decided.
        unsure: those that the measurement could not tell from the chosen one, for the evidence.
        final_rules: of the blocks that decided; None where the races did.
    """
    burst_weight = 0.0 if final_rules is None else final_rules.burst_weight
    state = timer.state()
    # Those that ran alone first, as they stand; the sort leaves the others in the race's order.
    rest = [_measurement(c, found) for c in found.raced() if c not in tied]
    rest.sort(key=lambda entry: entry.score(burst_weight))
    ranking = [*(_measurement(c, found) for c in tied), *rest]
    shown = {entry.candidate for entry in ranking}
    failed = [
        Measurement(c, None, 0, eliminated=f"failed: {why}") for c, why in found.failed.items()
    ]
    shown |= set(found.failed)
    eliminated = [_measurement(c, found) for c in found.screening.eliminated if c not in shown]
    if found.atens_plan is not None:
        by_candidate = {entry.candidate: entry for entry in [*ranking, *eliminated, *failed]}
        same = by_candidate.get(found.atens_plan) or _measurement(found.atens_plan, found)
        text = same.candidate.text
        eliminated.append(replace(same, candidate=ATEN, eliminated=f"it is {text}", runs=text))
    eliminated.sort(key=lambda entry: math.inf if entry.time_ms is None else entry.time_ms)
    remarks = list(found.remarks)
    unseen = len(found.screening.out_of_budget)
    if unseen:
        remarks.append(
            left_unseen(unseen, len(found.screening.rough_ms | found.screening.eliminated))
        )
    samples = sum(n for outcome in found.races for n in outcome.samples.values())
    return Selection(
        tuple([*ranking, *eliminated, *failed]),
        samples + found.screening.samples + found.extra_samples,
        Evidence(
            rule=rule,
            tied=tuple(dict.fromkeys(c.text for c in [*tied, *unsure])),
            burst_weight=burst_weight,
            sustained_reach=Evidence.sustained_reach if final_rules is None else final_rules.reach,
            regret_bound=regret_bound if found.is_judged else None,
            confidence=rules.confidence,
            gpu_ms=found.screening.gpu_ms
            + sum(outcome.gpu_ms for outcome in found.races)
            + found.extra_gpu_ms,
            wall_ms=timer.elapsed_ms(),
            clock_mhz=found.last.clock_mhz,
            sustained_clock_mhz=found.sustained_clock_mhz.get(tied[0]),
            max_clock_mhz=state.max_clock_mhz,
            throttle_reasons=tuple(found.throttle_reasons | dict.fromkeys(state.throttle_reasons)),
            disturbed=sum(outcome.disturbed for outcome in found.races),
            budget_ms=found.budget.cut_short_ms,
            remarks=tuple([*remarks, *_of_races(found)]),
        ),
    )


def _of_races(found: SearchState) -> list[str]:
    """Their remarks; what one left undecided the next has decided."""
    earlier = [r for race in found.races[:-1] for r in race.remarks if r != UNDECIDED]
    return [*earlier, *found.last.remarks]


def _measurement(candidate: Candidate, found: SearchState) -> Measurement:
    time_ms = found.ms(candidate)
    samples = sum(outcome.samples.get(candidate, 0) for outcome in found.races)
    for outcome in reversed(found.races):
        if candidate in outcome.log_time:
            # Of one candidate's time; the half width is that of a difference of two.
            spread = math.exp(outcome.half_width[candidate] / math.sqrt(2))
            # Whoever was run alone afterwards was not out.
            alone = candidate in found.sustained_ms
            dropped = candidate not in outcome.survivors and not alone
            return Measurement(
                candidate,
                time_ms,
                samples,
                low_ms=None if time_ms is None else time_ms / spread,
                high_ms=None if time_ms is None else time_ms * spread,
                sustained_ms=found.sustained_ms.get(candidate),
                eliminated=f"out of the race after {samples} calls" if dropped else "",
            )
    why, rough = found.screening.eliminated.get(candidate, ("", None))
    return Measurement(candidate, time_ms, 0 if rough is None else 1, eliminated=why)
