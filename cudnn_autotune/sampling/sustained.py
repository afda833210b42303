"""``sustained``: a race, and a steady-state final where the board throttles and it could matter.

After the race its leader runs alone for 0.16 s. If the clock holds, or if no candidate could beat
the leader at any clock, the race has decided. Else the contenders get sustained runs too, and their
times in the race are weighed against their steady times (``steady_final``). ``sustained_run`` says
why a race cannot show steady times.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.conclusion import race_selection
from cudnn_autotune.sampling.contenders import could_win
from cudnn_autotune.sampling.final_rules import FinalRules
from cudnn_autotune.sampling.race_rules import RaceRules
from cudnn_autotune.sampling.search import search
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.sustained_choice import probe_leader, sustained_selection
from cudnn_autotune.timers.timer import Timer


@dataclass(frozen=True)
class Sustained:
    """The mode ``sustained``. ``seed`` fixes the order of turns; with None it is random."""

    name: str = "sustained"
    race_rules: RaceRules = field(default_factory=RaceRules)
    final_rules: FinalRules = field(default_factory=FinalRules)
    seed: int | None = None

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        found = search(candidates, timer, limits, self.race_rules, random.Random(self.seed))
        if found is None:
            return None
        if not could_win(found, math.inf, None, self.final_rules):
            if not found.screening.out_of_budget:
                found.remarks.append("no contender within reach: no need to run the leader alone")
            return race_selection(found)
        probe = probe_leader(found)
        if probe is None:
            return race_selection(found)
        return sustained_selection(found, probe, self.final_rules)
