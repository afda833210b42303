"""``race``: candidates take turns until one is the fastest, or until it no longer matters.

It measures the time of short batches under a clock that all candidates share. On a board that
reaches its power limit the order may be another one under sustained load: see ``sustained``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.conclusion import race_selection
from cudnn_autotune.sampling.race_rules import RaceRules
from cudnn_autotune.sampling.search import search
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers.timer import Timer


@dataclass(frozen=True)
class Race:
    """The mode ``race``. ``seed`` fixes the order of turns; with None it is random."""

    name: str = "race"
    rules: RaceRules = field(default_factory=RaceRules)
    seed: int | None = None

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        return race_selection(search(candidates, timer, limits, self.rules, self.seed))
