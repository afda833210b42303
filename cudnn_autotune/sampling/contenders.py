"""Contenders: candidates that could be faster than the race's leader in a sustained run.

The constants are from the records behind docs/findings/power-limit.md and of
benchmarks/audit_layers.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.sampling.final_rules import FinalRules
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.ties import TIE_WIDTH

# Configs of one family slow down alike in sustained runs: of 36 pairs on H200s within 1.0 % in the
# median, 2.9 % in nine of ten, 6.6 % at most; other pairs within 0.8, 4.9 and 10.7 %.
_FAMILY_SPREAD = 0.05
# A second config of a family gets a sustained run, too, if it is this near to the race's leader: in
# 4 of 82 layers on which H200s throttle, such a config was the best, by 1 %.
_ALIKE_WITHIN = 0.02
# A race may overestimate a candidate's time by this factor, which the choice of contenders allows
# for.
_RACE_ERROR = 0.01


def could_win(
    found: SearchState, steady_ms: float, max_clock_mhz: float | None, rules: FinalRules
) -> list[Candidate]:
    """Returns the contenders: first what PyTorch would run, then the others, the most promising
    first.

    They are within ``rules.reach`` of the leader, and their optimistic time, with what they lose in
    the race by ``rules.burst_weight``, is below ``steady_ms``. They are the fastest of each family
    of configs, and of one family a second one if it is near enough to the leader.

    Args:
        steady_ms: milliseconds of a call of the leader in its sustained run.
        max_clock_mhz: the highest SM clock; None if it is unknown.
    """
    leader_ms = found.ms(found.leader) or math.inf
    seen = {found.leader.config_family}
    firsts, alike = [], []
    for candidate, least_ms in _optimistic_ms(found, max_clock_mhz).items():
        behind = (found.ms(candidate) or math.inf) / leader_ms
        if behind >= rules.reach:
            continue
        # A candidate whose possible gain is within the tie width need not run.
        least_ms *= (1 - _RACE_ERROR) * max(1.0, behind) ** rules.burst_weight
        if least_ms >= steady_ms * (1 - TIE_WIDTH):
            continue
        if candidate.config_family not in seen:
            seen.add(candidate.config_family)
            firsts.append(candidate)
        elif candidate != found.leader and behind < 1 + _ALIKE_WITHIN:
            alike.append(candidate)

    def is_not_pytorchs(candidate: Candidate) -> bool:
        return candidate.text != found.pytorchs

    return sorted([*firsts, *sorted(alike, key=is_not_pytorchs)[:1]], key=is_not_pytorchs)


def least_ms_alone(
    found: SearchState, steady_ms: Mapping[Candidate, float], max_clock_mhz: float | None
) -> dict[Candidate, float]:
    """Returns a lower bound of the steady time of each candidate that raced but had no sustained
    run. The bound is the optimistic time. Where a config of the same family had a sustained run, it
    is at least the time in the race with that config's slowdown. Both start from the lower end of
    the interval of the time in the race.

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
    """Scales the times in the race to the highest clock, as if they were inversely proportional to
    it."""
    clock_mhz, scale = found.last.clock_mhz, 1.0
    if clock_mhz and max_clock_mhz:
        scale = min(1.0, clock_mhz / max_clock_mhz)
    raced = [c for c in found.raced() if not (found.aten_is_cudnn and c.text == ATEN.text)]
    return {c: (found.ms(c) or math.inf) * scale for c in raced}
