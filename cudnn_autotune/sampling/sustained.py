"""``sustained``: a race, then a sustained run of each candidate that could win at its steady clock.
Where the board does not throttle, the race decides. ``sustained_run`` says why a race cannot show
steady times.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.conclusion import race_selection
from cudnn_autotune.sampling.final_rules import FinalRules
from cudnn_autotune.sampling.race_rules import RaceRules
from cudnn_autotune.sampling.search import search
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.sustained_choice import (
    PROBE_CHUNKS,
    probe_leader,
    sustained_selection,
)
from cudnn_autotune.timers.timer import Timer


def _final_rules() -> FinalRules:
    return FinalRules(
        reach=1.15,
        most=8,
        again_chunks=6,
        rerun_margin=0.04,
        most_again=3,
        passes=3,
        confident=2.0,
        precise=0.003,
        equal=0.01,
        burst_weight=0.0,
        is_patient=True,
    )


@dataclass(frozen=True)
class Sustained:
    """The mode ``sustained``. ``seed`` fixes the order of turns; with None it is random."""

    name: str = "sustained"
    race_rules: RaceRules = field(default_factory=RaceRules)
    final_rules: FinalRules = field(default_factory=_final_rules)
    seed: int | None = None

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        found = search(candidates, timer, limits, self.race_rules, random.Random(self.seed))
        if found is None:
            return None
        probe = probe_leader(found, 2 * PROBE_CHUNKS)
        if probe is None:
            return race_selection(found)
        return sustained_selection(found, probe, self.final_rules)
