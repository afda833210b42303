"""``sample_once``, ``median_of_three``, ``till_stable``: cuDNN's own sampling techniques.

They are ``cudnn_frontend::time_sorted_plan`` itself, so that they mean what cuDNN means: one
warm-up, then single launches between events, each waited for. ``till_stable`` takes samples until
one is not at least 5 % faster than the best before it (100 at most), and reports the best: at 1 to
2 % of jitter that is the best of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.sampling.selection import Selection
from cudnn_autotune.sampling.strategy import Candidates
from cudnn_autotune.sampling.timer import Timer


@dataclass(frozen=True)
class FrontendMode:
    name: str

    def select(
        self, candidates: Candidates, timer: Timer, benchmark_limit: int
    ) -> Selection | None:
        runnable = timer.runnable(candidates.all(), limit=benchmark_limit)
        if not runnable:
            return None
        selection = timer.frontend_find(self.name, runnable, benchmark_limit)
        return selection if selection.ranking else None


FRONTEND_MODES = tuple(
    FrontendMode(name) for name in ("sample_once", "median_of_three", "till_stable")
)
