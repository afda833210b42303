"""Who could beat the race's leader alone: what their times in the race leave possible."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.sampling.config_family import config_family
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.steady_final import FinalRules
from cudnn_autotune.sampling.ties import TIE_WIDTH

# Configs of one kind slow down alike when they run alone: of 36 pairs on H200s within 1.0 % in the
# median, 2.9 % in nine of ten, 6.6 % at most; others within 0.8, 4.9 and 10.7 %.
_FAMILY_SPREAD = 0.05
# Another one of a kind that is represented may run alone, too, if it is so near to the race's
# leader: in 4 of 82 layers that H200s throttle such a one was the best, by 1 %.
_ALIKE_WITHIN = 0.02
# By so much a race may take a candidate for slower than it is, for the question who runs alone.
_RACE_ERROR = 0.01


def could_win(
    found: SearchState, steady_ms: float, max_clock_mhz: float | None, rules: FinalRules
) -> list[Candidate]:
    """Rivals of the race's leader that may stand better than it alone: what PyTorch would run, then
    the most promising first.

    Those within ``rules.reach`` whose optimistic time, with what they lose in the race by
    ``rules.burst_weight``, is below ``steady_ms``: of each kind the fastest, and at last one of
    the others that are near enough to the leader.
    """
    leader_ms = found.ms(found.leader) or math.inf
    seen = {config_family(found.leader)}
    firsts, alike = [], []
    optimistic_ms = _optimistic_ms(found, found.last.clock_mhz, max_clock_mhz)
    for candidate, least_ms in optimistic_ms.items():
        behind = (found.ms(candidate) or math.inf) / leader_ms
        if behind >= rules.reach:
            continue
        # Who gains less than what counts as a tie need not run.
        least_ms *= (1 - _RACE_ERROR) * max(1.0, behind) ** rules.burst_weight
        if least_ms >= steady_ms * (1 - TIE_WIDTH):
            continue
        if config_family(candidate) not in seen:
            seen.add(config_family(candidate))
            firsts.append(candidate)
        elif candidate != found.leader and behind < 1 + _ALIKE_WITHIN:
            alike.append(candidate)

    def is_anothers(candidate: Candidate) -> bool:
        return candidate.text != found.pytorchs

    return sorted([*firsts, *sorted(alike, key=is_anothers)[:1]], key=is_anothers)


def least_ms_alone(
    found: SearchState, steady_ms: Mapping[Candidate, float], max_clock_mhz: float | None
) -> dict[Candidate, float]:
    """Of those that raced and were not run alone: the least that each may take where it is.

    Its optimistic time; where one of its kind was run alone, no less than what that one's slowdown
    makes of its time in the race. Both by the low end of its time in the race.

    Args:
        steady_ms: of those that were run alone.
    """
    slowdown: dict[object, float] = {}
    for candidate, ms in steady_ms.items():
        slower = ms / (found.ms(candidate) or ms)
        slowdown[config_family(candidate)] = min(
            slower, slowdown.get(config_family(candidate), slower)
        )
    least = {}
    clock_mhz = found.last.median_round_mhz
    for candidate, optimistic_ms in _optimistic_ms(found, clock_mhz, max_clock_mhz).items():
        if candidate in steady_ms:
            continue
        of_family = slowdown.get(config_family(candidate), 0.0) * (1 - _FAMILY_SPREAD)
        middle_ms = max(optimistic_ms, of_family * (found.ms(candidate) or 0.0))
        least[candidate] = middle_ms * math.exp(-found.half_width(candidate))
    return least


def _optimistic_ms(
    found: SearchState, clock_mhz: float | None, max_clock_mhz: float | None
) -> dict[Candidate, float]:
    """Of all that raced, at ``clock_mhz``: at the highest clock, if their times go with it."""
    scale = 1.0
    if clock_mhz and max_clock_mhz:
        scale = min(1.0, clock_mhz / max_clock_mhz)
    raced = [c for c in found.raced() if not (found.aten_is_cudnn and c.text == ATEN.text)]
    return {c: (found.ms(c) or math.inf) * scale for c in raced}
