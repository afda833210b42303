"""``sample_once``, ``median_of_three``, ``till_stable``: cuDNN's own sampling techniques.

They call ``cudnn_frontend::time_sorted_plan`` itself: one warm-up, then single launches between
events, with a wait after each. ``till_stable`` takes samples (100 at most) until one is not at
least 5 % faster than the best before it, and reports the best. With 1 to 2 % of jitter that is the
best of two. These stopping rules are cuDNN's.

If PyTorch would not use cuDNN, its own kernels then take turns with the winner for a few rounds.
With a budget, candidates are sampled in the list's order until the time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.strategy import Budget, Candidates, Limits, left_unseen
from cudnn_autotune.timers.timer import Batch, Timer

_DUEL_ROUNDS = 5
# Compiling at run time may take this share of a budget; the rest is for sampling.
_COMPILING_SHARE = 0.5


@dataclass(frozen=True)
class FrontendMode:
    """The mode of one of cuDNN's techniques, ``name``."""

    name: str

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        budget = Budget(timer, limits)
        listed = candidates.all()
        unseen = 0
        if budget.is_limited:
            found, unseen = _within(budget, self.name, listed, timer, limits.benchmark_limit)
        else:
            runnable = timer.runnable(listed, limit=limits.benchmark_limit)
            found = Selection((), 0)
            if runnable:
                found = timer.frontend_find(self.name, runnable, limits.benchmark_limit)
        if not found.ranking:
            return None
        rule = "fastest"
        if not candidates.aten_uses_cudnn:
            found = _against_aten(found, timer, budget)
            rule = "fastest, after a duel with PyTorch's own kernels"
        evidence = Evidence(
            rule=rule,
            tied=(found.winner.candidate.text,),
            wall_ms=timer.elapsed_ms(),
            budget_ms=budget.cut_short_ms,
            remarks=(left_unseen(unseen, len(listed)),) if unseen else (),
        )
        return replace(found, evidence=evidence)


def _within(
    budget: Budget, technique: str, listed: Sequence[Candidate], timer: Timer, limit: int
) -> tuple[Selection, int]:
    """Runs cuDNN's search over the part of the list that the budget allows.

    The first candidate, which PyTorch would run, is built and sampled in any case.

    Returns:
        The selection, and the number of candidates left out.
    """
    compiled = [c for c in listed[1:] if c.is_compiled]
    too_many = set(compiled[budget.compilable(len(compiled), _COMPILING_SHARE) :])
    buildable = [c for c in listed if c not in too_many]
    runnable = timer.runnable(buildable, limit=limit)
    timed: list[Measurement] = []
    samples = 0
    unseen = len(too_many) if not limit or len(runnable) < limit else 0
    for number, candidate in enumerate(runnable):
        if timed and budget.is_spent():
            unseen += len(runnable) - number
            break
        found = timer.frontend_find(technique, [candidate], 0)
        timed += found.ranking
        samples += found.total_samples
    return Selection(tuple(sorted(timed, key=_time_ms)), samples), unseen


def _time_ms(entry: Measurement) -> float:
    assert entry.time_ms is not None  # cuDNN's search ranks only the plans that it has timed
    return entry.time_ms


def _against_aten(found: Selection, timer: Timer, budget: Budget) -> Selection:
    """Times PyTorch's own kernels and the winner in turns; returns the faster's selection."""
    best = found.winner.candidate
    turns = [Batch(best, 1, "hot"), Batch(OWN_PATH, 1, "hot")]
    timer.run(turns)  # untimed: loads the kernels
    rounds = 1 if budget.is_spent() else _DUEL_ROUNDS
    samples = timer.run(turns * rounds)
    ours = float(np.median([s.time_ms for s in samples[::2]]))
    atens = float(np.median([s.time_ms for s in samples[1::2]]))
    entry = Measurement(OWN_PATH, atens, rounds)
    ranking = (entry, *found.ranking) if atens < ours else (found.winner, entry, *found.ranking[1:])
    return replace(found, ranking=ranking, total_samples=found.total_samples + 2 * rounds)


SAMPLE_ONCE = FrontendMode("sample_once")
MEDIAN_OF_THREE = FrontendMode("median_of_three")
TILL_STABLE = FrontendMode("till_stable")
FRONTEND_MODES = (SAMPLE_ONCE, MEDIAN_OF_THREE, TILL_STABLE)
