"""``heuristic``: the first plan of cuDNN's heuristics; nothing is timed."""

from __future__ import annotations

from cudnn_autotune.sampling.selection import Selection, Timed
from cudnn_autotune.sampling.strategy import Candidates
from cudnn_autotune.sampling.timer import Timer


class Heuristic:
    name = "heuristic"

    def select(
        self, candidates: Candidates, timer: Timer, benchmark_limit: int
    ) -> Selection | None:
        # Mode after mode: B and FALLBACK are only asked where A has nothing that runs.
        for mode in ("A", "B", "FALLBACK"):
            first = timer.runnable(candidates.of_mode(mode), limit=1)
            if first:
                return Selection((Timed(first[0], None, 0),), total_samples=0)
        return None
