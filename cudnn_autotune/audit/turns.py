"""Candidates that take turns: who may take part, and the rounds.

It shares no loop with ``sampling``: the judge must not inherit the cuts of whom it judges, or bugs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from cudnn_autotune.audit.config import OracleSettings
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Batch, Cache, Timer

# Only what is this slow is cut by its first run, in which anything may happen.
_HOPELESS_FIRST_RUN = 10.0
_FIRST_RUN_MS = 100.0
# Two of an engine's configs in a row were this slow: the others are not looked at.
_HOPELESS = 5.0
_FAR = 1.6  # a single sample, the clock perhaps still rising
_RACE_ROUNDS = 2  # of each cache state
_MOST_CALLS = 500


class Turns:
    """What is known of a case's candidates so far.

    Args:
        timer: of the case.
        picked: texts of candidates that are never left out for being slow.
    """

    def __init__(
        self, timer: Timer, settings: OracleSettings, picked: Collection[str] = ()
    ) -> None:
        self.timer = timer
        self.settings = settings
        self.picked = set(picked)
        self.rough_ms: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        """Candidates that do not build or run, and why."""
        self.clocks_mhz: list[float] = []
        self._rng = random.Random(settings.seed)

    def screen(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that run and are not far behind after one sample."""
        best = math.inf
        hopeless: Counter[int | None] = Counter()
        """Engine -> how many of its configs in a row."""
        for candidate in candidates:
            if hopeless[candidate.engine] > 1 and candidate.text not in self.picked:
                continue
            first = self._time(candidate)
            if first is None:
                continue
            rough = first
            if first <= _HOPELESS_FIRST_RUN * best + _FIRST_RUN_MS:
                again = self._time(candidate)
                if again is None:
                    continue
                rough = again
                best = min(best, rough)
            self.rough_ms[candidate.text] = rough
            is_slow = rough > _HOPELESS * best and candidate.engine is not None
            hopeless[candidate.engine] = hopeless[candidate.engine] + 1 if is_slow else 0
        return [
            c
            for c in candidates
            if c.text in self.rough_ms
            and (c.text in self.picked or self.rough_ms[c.text] <= _FAR * best)
        ]

    def _time(self, candidate: Candidate) -> float | None:
        (sample,) = self.timer.run([Batch(candidate)])
        if not math.isfinite(sample.time_ms):
            self.failed[candidate.text] = sample.error or "does not run"
            return None
        return sample.time_ms

    def race(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """What is worth long rounds, fastest first; everything that was picked among it."""
        times = self.interleaved(candidates, _RACE_ROUNDS, ("cold", "hot"))
        both = {text: row + times["hot"][text] for text, row in times["cold"].items()}
        if not both:
            return []
        level = {text: float(np.exp(np.mean(np.log(row)))) for text, row in both.items()}
        self.rough_ms.update(level)
        best = min(level.values())
        order = sorted((c for c in candidates if c.text in level), key=lambda c: level[c.text])
        kept = [c for c in order if level[c.text] <= self.settings.within * best]
        kept = kept[: self.settings.survivors]
        return kept + [c for c in order if c.text in self.picked and c not in kept]

    def interleaved(
        self, candidates: Sequence[Candidate], rounds: int, caches: Sequence[Cache]
    ) -> dict[str, dict[str, list[float]]]:
        """Cache -> candidate -> its times, one a round; whoever fails once is left out."""
        times: dict[str, dict[str, list[float]]] = {
            cache: {c.text: [] for c in candidates} for cache in caches
        }
        order: list[Candidate] = list(candidates)
        for index in range(rounds):
            order = [c for c in order if c.text not in self.failed]
            if not order:
                break
            if index % 2 == 0:
                self._rng.shuffle(order)
            else:
                order.reverse()
            for cache in caches:
                batches = [Batch(c, self.calls(c, self.settings.batch_ms), cache) for c in order]
                for candidate, sample in zip(order, self.timer.run(batches), strict=True):
                    times[cache][candidate.text].append(sample.time_ms)
                    if not math.isfinite(sample.time_ms):
                        self.failed[candidate.text] = sample.error or "fails to run"
                    elif sample.clock_mhz is not None:
                        self.clocks_mhz.append(sample.clock_mhz)
        return {
            cache: {text: row for text, row in rows.items() if text not in self.failed and row}
            for cache, rows in times.items()
        }

    def calls(self, candidate: Candidate, batch_ms: float) -> int:
        """That fill ``batch_ms``, about."""
        wanted = math.ceil(batch_ms / max(self.rough_ms[candidate.text], 1e-4))
        return max(1, min(wanted, _MOST_CALLS))
