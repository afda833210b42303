"""Screens the candidates of a case for the oracle's rounds, and runs the rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from cudnn_autotune.audit.config import OracleSettings
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Cache, Timer
from cudnn_autotune.timers.turns import Turns

CACHES: tuple[Cache, ...] = ("cold", "hot")
# A first run may be disturbed in many ways, so only a candidate this much slower gets no second
# one.
_HOPELESS_FIRST_RUN = 10.0
_FIRST_RUN_MS = 100.0
# After two configs of an engine in a row that are this slow, its other configs do not run.
_HOPELESS = 5.0
# After one sample, with the clock perhaps still rising, a candidate this slow is left out.
_FAR = 1.6
_RACE_ROUNDS = 2
# At most so many candidates, up to this factor behind the best, reach the rounds.
_SURVIVORS = 10
_WITHIN = 1.10
_BATCH_MS = 0.5
ROUNDS = 16
"""Rounds with a cold cache, and as many with a hot one."""


class JudgedTurns(Turns):
    """The screening and the rounds of one case. Candidates whose texts are in ``picked`` are never
    left out for being slow."""

    def __init__(
        self, timer: Timer, settings: OracleSettings, picked: Collection[str] = ()
    ) -> None:
        super().__init__(timer, settings.seed)
        self.settings = settings
        self.picked = set(picked)
        self.clocks_mhz: list[float] = []
        """The SM clock of each short batch."""

    def screen(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Runs candidates once or twice; returns those that run and are not far behind."""
        best = math.inf
        slow_in_a_row: Counter[str] = Counter()
        for candidate in candidates:
            engine = candidate.engine_name
            if slow_in_a_row[engine] > 1 and candidate.text not in self.picked:
                continue
            sample = self.once(candidate)
            if sample and sample.time_ms <= _HOPELESS_FIRST_RUN * best + _FIRST_RUN_MS:
                sample = self.once(candidate)
                best = min(best, sample.time_ms if sample else math.inf)
            if sample is None:
                continue
            self.rough_ms[candidate.text] = sample.time_ms
            is_slow = sample.time_ms > _HOPELESS * best and candidate.engine is not None
            slow_in_a_row[engine] = slow_in_a_row[engine] + 1 if is_slow else 0
        return [
            c
            for c in candidates
            if c.text in self.rough_ms
            and (c.text in self.picked or self.rough_ms[c.text] <= _FAR * best)
        ]

    def race(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates that are worth long rounds, fastest first, and those that were
        picked."""
        times = self.interleaved(candidates, _RACE_ROUNDS)
        level = {
            text: float(np.exp(np.mean(np.log([*row, *times["hot"][text]]))))
            for text, row in times["cold"].items()
        }
        if not level:
            return []
        self.rough_ms.update(level)
        limit = _WITHIN * min(level.values())
        order = sorted((c for c in candidates if c.text in level), key=lambda c: level[c.text])
        kept = [c for c in order if level[c.text] <= limit][:_SURVIVORS]
        return kept + [c for c in order if c.text in self.picked and c not in kept]

    def interleaved(
        self, candidates: Sequence[Candidate], rounds: int
    ) -> dict[Cache, dict[str, list[float]]]:
        """Runs rounds with a cold and with a hot cache. Returns milliseconds of a call by cache
        state, candidate and round, without the candidates that failed in any round."""
        times: dict[Cache, dict[str, list[float]]] = {cache: {} for cache in CACHES}
        for _ in range(rounds):
            order = self.next_order(candidates)
            for cache in CACHES:
                for text, sample in self.round(order, cache, _BATCH_MS).items():
                    times[cache].setdefault(text, []).append(sample.time_ms)
                    if sample.clock_mhz is not None:
                        self.clocks_mhz.append(sample.clock_mhz)
        return {
            cache: {text: row for text, row in rows.items() if text not in self.failed}
            for cache, rows in times.items()
        }
