"""Runs candidates in turns of short batches, for recordings and audits.

It shares no loop with ``sampling``: raw samples and audits must not inherit a strategy's
eliminations, or its bugs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Batch, Cache, Sample, Timer

_MOST_CALLS = 500


class Turns:
    """Runs candidates that the timer has built in turns, whose order ``seed`` determines, and keeps
    their rough times and failures."""

    def __init__(self, timer: Timer, seed: int) -> None:
        self.timer = timer
        self.rough_ms: dict[str, float] = {}
        """Milliseconds of a call, by the candidate's text: the latest estimate."""
        self.failed: dict[str, str] = {}
        """Why a candidate does not build or run, by its text."""
        self._rng = random.Random(seed)
        self._order: list[str] = []
        self._is_mirrored = True

    def once(self, candidate: Candidate) -> Sample | None:
        """Runs a single call; returns None if it fails."""
        return self.run([Batch(candidate)]).get(candidate.text)

    def calls(self, candidate: Candidate, batch_ms: float) -> int:
        """Returns the number of calls that take about ``batch_ms``: at least 1, at most 500."""
        wanted = math.ceil(batch_ms / max(self.rough_ms[candidate.text], 1e-4))
        return max(1, min(wanted, _MOST_CALLS))

    def next_order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the order of a round, without those that failed.

        It is random in one round and its mirror image in the next, so that a linear drift cancels.
        """
        allowed = {c.text: c for c in candidates if c.text not in self.failed}
        if self._is_mirrored:
            self._order = list(allowed)
            self._rng.shuffle(self._order)
        else:
            self._order.reverse()
        self._is_mirrored = not self._is_mirrored
        return [allowed[text] for text in self._order if text in allowed]

    def round(self, order: Sequence[Candidate], cache: Cache, batch_ms: float) -> dict[str, Sample]:
        """Runs one batch of each candidate; returns the samples of those that did not fail."""
        return self.run([Batch(c, self.calls(c, batch_ms), cache) for c in order])

    def run(self, batches: Sequence[Batch]) -> dict[str, Sample]:
        """Runs batches of different candidates; records failures, and returns the other samples."""
        found = {}
        for batch, sample in zip(batches, self.timer.run(batches), strict=True):
            if math.isfinite(sample.time_ms):
                found[batch.candidate.text] = sample
            else:
                self.failed[batch.candidate.text] = sample.error or "fails to run"
        return found
