"""``sustained``: a race, and a steady-state final if the board throttles and it could matter.

After the race its leader runs alone for 0.16 s. If the clock holds, or if no candidate could beat
the leader at any clock, the race has decided. Else the contenders get sustained runs too, and their
times in the race are weighed against their steady times (``final``). ``run`` explains why a race
cannot show steady times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.race import FinalRules, Race, build_selection, race_selection
from cudnn_autotune.sampling.search import at_once
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sustained.final import SteadyFinal, SteadyTimes
from cudnn_autotune.sustained.run import SustainedRun, run_alone, run_ms

# Contenders could be faster than the race's leader in a sustained run. Their constants are from the
# records behind docs/findings/power-limit.md and of benchmarks/audit_layers.py. Configs of one
# family slow down alike in sustained runs: 36 pairs on H200s within 1.0 % in the median, 2.9 % in
# nine of ten, 6.6 % at most; other pairs within 0.8, 4.9 and 10.7 %.
_FAMILY_SPREAD = 0.05
# A second config of a family gets a sustained run, too, if it is this near to the race's leader: in
# 4 of 82 layers that throttle H200s, such a config was the best, by 1 %.
_ALIKE_WITHIN = 0.02
# The choice of contenders assumes that a race may overestimate a candidate's time by this factor.
_RACE_ERROR = 0.01


def could_win(
    found: SearchState, steady_ms: float, max_clock_mhz: float | None, rules: FinalRules
) -> list[Candidate]:
    """Returns the contenders: first PyTorch's candidate, then the others, the most promising first.

    The leader is the race's choice (``SearchState.choice``). They are within ``rules.reach`` of the
    leader. Their optimistic time, with their loss in the race weighted by ``rules.burst_weight``,
    is below ``steady_ms``. They are the fastest of each family of configs, and a family's second
    one if it is near enough to the leader.

    Args:
        steady_ms: milliseconds of a call of the leader in its sustained run.
        max_clock_mhz: the highest SM clock; None if it is unknown.
    """
    leader = found.choice
    leader_ms = found.ms(leader) or math.inf
    seen = {leader.config_family}
    firsts, alike = [], []
    for candidate, least_ms in _optimistic_ms(found, max_clock_mhz).items():
        behind = (found.ms(candidate) or math.inf) / leader_ms
        if behind >= rules.reach:
            continue
        # A candidate with a possible gain within the tie width need not run.
        least_ms *= (1 - _RACE_ERROR) * max(1.0, behind) ** rules.burst_weight
        if least_ms >= steady_ms * (1 - found.rules.tie_width):
            continue
        if candidate.config_family not in seen:
            seen.add(candidate.config_family)
            firsts.append(candidate)
        elif candidate != leader and behind < 1 + _ALIKE_WITHIN:
            alike.append(candidate)

    def is_not_pytorchs(candidate: Candidate) -> bool:
        return candidate.text != found.pytorchs

    return sorted([*firsts, *sorted(alike, key=is_not_pytorchs)[:1]], key=is_not_pytorchs)


def least_steady_ms(
    found: SearchState, steady_ms: Mapping[Candidate, float], max_clock_mhz: float | None
) -> dict[Candidate, float]:
    """Returns a lower bound of the steady time of each candidate that raced without a sustained
    run. The bound is the optimistic time. If a config of the same family had a sustained run, it is
    at least the time in the race with that config's slowdown. Both use the lower end of the race's
    interval.

    Args:
        steady_ms: steady times of the candidates that had sustained runs.
    """
    slowdown: dict[object, float] = {}
    for candidate, ms in steady_ms.items():
        slower, family = ms / (found.ms(candidate) or ms), candidate.config_family
        slowdown[family] = min(slower, slowdown.get(family, slower))
    least = {}
    for candidate, optimistic_ms in _optimistic_ms(found, max_clock_mhz).items():
        if candidate in steady_ms:
            continue
        of_family = slowdown.get(candidate.config_family, 0.0) * (1 - _FAMILY_SPREAD)
        middle_ms = max(optimistic_ms, of_family * (found.ms(candidate) or 0.0))
        least[candidate] = middle_ms * math.exp(-found.half_width(candidate))
    return least


def _optimistic_ms(found: SearchState, max_clock_mhz: float | None) -> dict[Candidate, float]:
    """Scales the race's times to the highest clock, as if inversely proportional to it."""
    clock_mhz, scale = found.last.clock_mhz, 1.0
    if clock_mhz and max_clock_mhz:
        scale = min(1.0, clock_mhz / max_clock_mhz)
    raced = [c for c in found.raced() if not (found.aten_is_cudnn and c.text == OWN_PATH.text)]
    return {c: (found.ms(c) or math.inf) * scale for c in raced}


# Chunks of 40 ms of the sustained run that shows whether the board throttles.
_PROBE_CHUNKS = 4


@dataclass(frozen=True)
class SteadyState:
    """The steady-state final (a ``sampling.race.Final``)."""

    rules: FinalRules = field(default_factory=FinalRules)

    def select(self, found: SearchState) -> Selection | None:
        if not could_win(found, math.inf, None, self.rules):
            if not found.screening.out_of_budget:
                found.remarks.append("no contender within reach: no need to run the leader alone")
            return race_selection(found)
        probe = _probe_leader(found)
        if probe is None:
            return race_selection(found)
        return _selection(found, probe, self.rules)


def _probe_leader(found: SearchState) -> SustainedRun | None:
    """Runs the race's leader alone, or the next best if it fails.

    Returns:
        The run. None if the budget forbids it, so that the race decides, or if no candidate is
        left.
    """
    while found.last.survivors:
        leader = found.choice
        if not found.budget.affords(run_ms(_PROBE_CHUNKS, found.ms(leader) or 1.0)):
            found.remarks.append("the budget left no time to see whether the board throttles")
            return None
        run = run_alone(found, leader, _PROBE_CHUNKS)
        if run is not None:
            found.sustained_ms[leader] = run.steady_ms
            return run
        at_once(found.race_again(found.rules))
    return None


def _selection(
    found: SearchState, probe: SustainedRun, final_rules: FinalRules
) -> Selection | None:
    """Chooses after the leader's run.

    The race decides if the clock held under the leader, or if no candidate could beat it in a
    sustained run; else the steady-state final does.

    Returns:
        The selection; None if all candidates have failed by now.
    """
    max_clock = found.timer.state().max_clock_mhz
    if not probe.is_throttled(max_clock):
        return race_selection(found)
    highest = max([*probe.clocks_mhz, *found.last.clocks_mhz, max_clock or 0.0]) or None
    contenders = could_win(found, probe.steady_ms, highest, final_rules)
    if not contenders:
        found.remarks.append("the board throttles; no contender could be faster at any clock")
        return race_selection(found)
    times = SteadyFinal(found, probe, contenders, final_rules).run()
    if not times.finalists:
        at_once(found.race_again(found.rules))
        return race_selection(found)
    found.sustained_ms.update(times.sustained_ms())
    if times.readings:
        readings = "1 reading" if times.readings == 1 else f"{times.readings} readings"
        found.remarks.append(f"times alone by {readings} of the board's power")
    best = times.best()
    logs = {c: math.log(found.sustained_ms[c]) for c in times.logs}
    near = [c for c in times.finalists if logs[c] - logs[best] <= final_rules.equal]
    # The rules for ties do not give a race's leader its place back that it lost in the final.
    equal = [c for c in near if c != probe.candidate or c == best]
    # Among candidates with equal steady times the fastest in the race wins; rules decide ties.
    in_turns = {c: found.ms(c) or math.inf for c in equal}
    fastest_ms = min(in_turns.values())
    width = ties.width(found.last.error)
    tied = [c for c in equal if in_turns[c] <= fastest_ms * (1 + width)]
    order, rule = ties.break_ties({c: math.exp(times.score(c)) for c in tied}, found.pytorchs)
    chosen = order[0]
    unsure = [c for c in logs if abs(logs[c] - logs[chosen]) <= 2 * times.error(c, chosen) + 1e-9]
    if min(logs, key=logs.__getitem__) not in tied:
        rule = "nearly as fast alone, faster in turns"
    elif len(tied) < len(equal):
        rule = "tie: faster in turns"
    bound = _regret_bound(chosen, times, found, highest)
    return build_selection(found, order, rule, bound, unsure, final_rules)


def _regret_bound(
    chosen: Candidate, times: SteadyTimes, found: SearchState, max_clock_mhz: float | None
) -> float | None:
    """Returns the largest possible relative loss of the chosen candidate to any other in the long
    run; None if the budget ended the final.

    Candidates with sustained runs enter with two standard errors, the others with their lower
    bounds.
    """
    if times.is_out_of_time:
        found.remarks.append("the budget ended the sustained runs")
        return None
    steady_ms = times.sustained_ms()
    log_chosen = math.log(steady_ms[chosen])
    leads = [
        log_chosen - math.log(ms) + 2 * times.error(c, chosen)
        for c, ms in steady_ms.items()
        if c != chosen
    ]
    least_ms = least_steady_ms(found, steady_ms, max_clock_mhz)
    unknown = [log_chosen - math.log(ms) + 2 * times.error(chosen) for ms in least_ms.values()]
    could_lead = [lead for lead in unknown if lead > 0]
    if could_lead:
        were = "contender was" if len(could_lead) == 1 else "contenders were"
        found.remarks.append(f"{len(could_lead)} {were} not run alone and could be faster")
    return math.expm1(max([0.0, *leads, *could_lead]))


SUSTAINED = Race("sustained", final=SteadyState())
