"""``neighbour``: the candidate that was chosen for the most similar problem; nothing is timed.

It is for shapes that change from call to call: the winner of a near shape is mostly better on a new
one than the heuristics' first plan (docs/findings/neighbours.md), which serves where no similar
problem is known.
"""

from __future__ import annotations

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.heuristic import Heuristic
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers.timer import Timer


class Neighbour:
    """The mode ``neighbour``."""

    name = "neighbour"

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        found = timer.runnable(candidates.similar(), limit=1)
        if not found:
            return Heuristic().select(candidates, timer, limits)
        rule = "chosen for a similar problem"
        evidence = Evidence(rule=rule, tied=(found[0].text,), wall_ms=timer.elapsed_ms())
        return Selection((Measurement(found[0], None, 0),), 0, evidence)
