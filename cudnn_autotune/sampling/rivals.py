"""Who could beat the race's leader alone: what their times in the race leave possible."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cudnn_autotune.engines import ATEN, Candidate
from cudnn_autotune.sampling.field import Field
from cudnn_autotune.sampling.finals import SoloRules
from cudnn_autotune.sampling.ties import TIE_WIDTH

# The knobs that name a config's tile or kernel. Configs that differ in others only (clusters,
# splits, workspace) slow down alike when they run alone: within 0.8 % in the median of eight pairs
# on an H200, 4.1 % at most (benchmarks/results/h200/audit_layers.json).
_TILES = ("TILE_SIZE", "KERNEL_CFG")
_KIND_SPREAD = 0.05
# By so much a race may take a candidate for slower than it is, for the question who runs alone.
_RACE_ERROR = 0.01


def could_win(
    found: Field, steady_ms: float, max_clock_mhz: float | None, rules: SoloRules
) -> list[Candidate]:
    """Rivals of the race's leader that may stand better than it alone: what PyTorch would run, then
    the most promising first.

    Those within ``rules.reach`` whose optimistic time, with what they lose in the race by
    ``rules.burst_weight``, is below ``steady_ms``; of each kind the fastest, since what
    distinguishes the power of two configs is their engine and tile, or their kernel.
    """
    leader_ms = found.ms(found.leader) or math.inf
    seen = {_kind(found.leader)}
    firsts = []
    optimistic_ms = _optimistic_ms(found, found.last.clock_mhz, max_clock_mhz)
    for candidate, least_ms in optimistic_ms.items():
        behind = (found.ms(candidate) or math.inf) / leader_ms
        if behind >= rules.reach:
            continue
        # Who gains less than what counts as a tie need not run.
        least_ms *= (1 - _RACE_ERROR) * max(1.0, behind) ** rules.burst_weight
        if least_ms >= steady_ms * (1 - TIE_WIDTH):
            continue
        if _kind(candidate) not in seen:
            seen.add(_kind(candidate))
            firsts.append(candidate)
    return sorted(firsts, key=lambda c: c.text != found.pytorchs)


def least_ms_alone(
    found: Field, steady_ms: Mapping[Candidate, float], max_clock_mhz: float | None
) -> dict[Candidate, float]:
    """Of those that raced and were not run alone: the least that each may take where it is.

    Its optimistic time; where one of its kind was run alone, no less than what that one's slowdown
    makes of its time in the race. Both by the low end of its time in the race.

    Args:
        steady_ms: of those that were run alone.
    """
    slowdown = {_kind(c): ms / (found.ms(c) or ms) for c, ms in steady_ms.items()}
    least = {}
    clock_mhz = found.last.median_round_mhz
    for candidate, optimistic_ms in _optimistic_ms(found, clock_mhz, max_clock_mhz).items():
        if candidate in steady_ms:
            continue
        of_kind = slowdown.get(_kind(candidate), 0.0) * (1 - _KIND_SPREAD)
        middle_ms = max(optimistic_ms, of_kind * (found.ms(candidate) or 0.0))
        least[candidate] = middle_ms * math.exp(-found.half_width(candidate))
    return least


def _optimistic_ms(
    found: Field, clock_mhz: float | None, max_clock_mhz: float | None
) -> dict[Candidate, float]:
    """Of all that raced, at ``clock_mhz``: at the highest clock, if their times go with it."""
    scale = 1.0
    if clock_mhz and max_clock_mhz:
        scale = min(1.0, clock_mhz / max_clock_mhz)
    raced = [c for c in found.raced() if not (found.aten_is_cudnn and c.text == ATEN.text)]
    return {c: (found.ms(c) or math.inf) * scale for c in raced}


def _kind(candidate: Candidate) -> tuple[object, ...]:
    named = tuple(candidate.knobs.get(knob) for knob in _TILES)
    return (candidate.engine, *named) if any(k is not None for k in named) else (candidate.text,)
