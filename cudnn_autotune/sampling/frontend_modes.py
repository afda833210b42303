"""``sample_once``, ``median_of_three``, ``till_stable``: cuDNN's own sampling techniques.

They are ``cudnn_frontend::time_sorted_plan`` itself, so that they mean what cuDNN means: one
warm-up, then single launches between events, each waited for. ``till_stable`` takes samples until
one is not at least 5 % faster than the best before it (100 at most), and reports the best: at 1 to
2 % of jitter that is the best of two.

Where PyTorch would not use cuDNN at all, its own kernels meet the winner in a short duel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cudnn_autotune.engines import ATEN
from cudnn_autotune.sampling.selection import Evidence, Selection, Timed
from cudnn_autotune.sampling.strategy import Candidates, Limits
from cudnn_autotune.sampling.timer import Batch, Timer

_DUEL_ROUNDS = 5


@dataclass(frozen=True)
class FrontendMode:
    name: str

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        runnable = timer.runnable(candidates.all(), limit=limits.benchmark_limit)
        found: Selection | None = None
        if runnable:
            found = timer.frontend_find(self.name, runnable, limits.benchmark_limit)
        if found is None or not found.ranking:
            return None
        rule = "fastest"
        if not candidates.aten_uses_cudnn:
            found = _against_aten(found, timer)
            rule = "fastest, after a duel with PyTorch's own kernels"
        evidence = Evidence(
            rule=rule, tied=(found.winner.candidate.text,), wall_ms=timer.elapsed_ms()
        )
        return replace(found, evidence=evidence)


def _against_aten(found: Selection, timer: Timer) -> Selection:
    best = found.winner.candidate
    turns = [Batch(best, 1, "hot"), Batch(ATEN, 1, "hot")]
    timer.run(turns)  # untimed: loads the kernels
    samples = timer.run(turns * _DUEL_ROUNDS)
    ours = float(np.median([s.time_ms for s in samples[::2]]))
    atens = float(np.median([s.time_ms for s in samples[1::2]]))
    entry = Timed(ATEN, atens, _DUEL_ROUNDS)
    ranking = (entry, *found.ranking) if atens < ours else (found.winner, entry, *found.ranking[1:])
    return replace(found, ranking=ranking, total_samples=found.total_samples + 2 * _DUEL_ROUNDS)


FRONTEND_MODES = tuple(
    FrontendMode(name) for name in ("sample_once", "median_of_three", "till_stable")
)
