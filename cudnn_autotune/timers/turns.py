"""The loop of turns: candidates run in rounds of short batches, for races, recordings and audits.

It eliminates only candidates that fail. The caller decides who takes turns, and judges the times:
an audit's oracle must not inherit the eliminations of the modes that it judges.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Batch, Cache, Sample, Timer

_MOST_CALLS = 500

Draw = Callable[[list[Candidate]], list[Candidate]]
"""Candidates -> the same ones in random order."""


class Mirrored:
    """A schedule: a random order for some rounds, then its mirror image for the same number of
    rounds, so that a linear drift cancels (randomised multiple interleaved trials: Abedi & Brecht,
    ICPE 2017).

    Args:
        draw: draws an order.
        repeats: number of rounds in one order, such as one for each cache state.
    """

    def __init__(self, draw: Draw, repeats: int = 1) -> None:
        self._draw = draw
        self._repeats = repeats
        self._order: list[Candidate] = []
        self._round = 0

    @classmethod
    def seeded(cls, seed: int) -> Mirrored:
        """Returns the schedule whose orders ``seed`` determines."""
        rng = random.Random(seed)

        def draw(candidates: list[Candidate]) -> list[Candidate]:
            rng.shuffle(candidates)
            return candidates

        return cls(draw)

    def next_order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the order of the next round, without those that are no longer among
        ``candidates``."""
        allowed = {c.text: c for c in candidates}
        place = self._round % (2 * self._repeats)
        if place == 0:
            self._order = self._draw(list(allowed.values()))
        elif place == self._repeats:
            self._order.reverse()
        self._round += 1
        return [allowed[c.text] for c in self._order if c.text in allowed]


class Turns:
    """Turns of candidates that the timer has built, with their rough times and failures.

    Args:
        schedule: orders the rounds; a number is the seed of :meth:`Mirrored.seeded`.
        rough_ms: milliseconds of a call by candidate's text, if it has run before.
        most_calls: most calls in a batch.
    """

    def __init__(
        self,
        timer: Timer,
        schedule: Mirrored | int,
        rough_ms: Mapping[str, float] | None = None,
        most_calls: int = _MOST_CALLS,
    ) -> None:
        self.timer = timer
        self.rough_ms = dict(rough_ms or {})
        """Milliseconds of a call, by the candidate's text: the latest estimate."""
        self.failed: dict[str, str] = {}
        """The reason why a candidate does not build or run, by its text."""
        self._schedule = Mirrored.seeded(schedule) if isinstance(schedule, int) else schedule
        self._most_calls = most_calls

    def once(self, candidate: Candidate) -> Sample | None:
        """Runs a single call; returns None if it fails."""
        return self.run([Batch(candidate)]).get(candidate.text)

    def calls(self, candidate: Candidate, batch_ms: float) -> int:
        """Returns the number of calls that take about ``batch_ms``: 1 to ``most_calls``."""
        wanted = math.ceil(batch_ms / max(self.rough_ms[candidate.text], 1e-4))
        return max(1, min(wanted, self._most_calls))

    def next_order(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the order of the schedule's next round, without those that failed."""
        return self._schedule.next_order([c for c in candidates if c.text not in self.failed])

    def round(self, order: Sequence[Candidate], cache: Cache, batch_ms: float) -> dict[str, Sample]:
        """Runs one batch of each candidate; returns the samples of successful ones."""
        return self.run([Batch(c, self.calls(c, batch_ms), cache) for c in order])

    def run(self, batches: Sequence[Batch]) -> dict[str, Sample]:
        """Runs batches of different candidates; records failures, and returns the other samples by
        the candidates' texts."""
        found = {}
        for batch, sample in zip(batches, self.timer.run(batches), strict=True):
            if not sample.error and 0 < sample.time_ms < math.inf:
                found[batch.candidate.text] = sample
            else:
                self.failed[batch.candidate.text] = sample.error or "no time was measured"
        return found
