"""``heuristic``: the first plan of cuDNN's heuristics, without timing."""

from __future__ import annotations

from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.strategy import Candidates, Limits
from cudnn_autotune.timers.timer import Timer


class Heuristic:
    """The mode ``heuristic``."""

    name = "heuristic"
    times = False

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        if not candidates.aten_uses_cudnn:
            # PyTorch has kernels of its own for the problem, and prefers them.
            rule = "PyTorch prefers its own kernels"
            return Selection(
                (Measurement(OWN_PATH, None, 0),), 0, Evidence(rule=rule, tied=(OWN_PATH.text,))
            )
        # Modes B and FALLBACK are queried only if no candidate of earlier modes runs.
        for mode in ("A", "B", "FALLBACK"):
            first = timer.runnable(candidates.of_mode(mode), limit=1)
            if first:
                rule = f"first of heuristic mode {mode}"
                evidence = Evidence(rule=rule, tied=(first[0].text,), wall_ms=timer.elapsed_ms())
                return Selection((Measurement(first[0], None, 0),), 0, evidence)
        return None
