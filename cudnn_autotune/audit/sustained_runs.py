"""Sustained runs of candidates: each runs alone until its time is steady."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cudnn_autotune.audit.judged_turns import CACHES, JudgedTurns, of_blocks
from cudnn_autotune.audit.model import Truth
from cudnn_autotune.expert import FAR_FROM_LIMIT, Candidate, at_limit_ms
from cudnn_autotune.sampling import Batch, Cache, GpuState, Sample

STRETCH = 5
"""The number of batches of each cache state between two checks of whether the time is steady."""


class RunCriterion:
    """Stops a run of batches of ``calls`` calls once the time is steady in every cache state, after
    ``least_ms`` of GPU time at the least and ``most_ms`` at the most. A time is steady if it
    changes by less than ``tolerance`` (relative)."""

    def __init__(self, calls: int, least_ms: float, most_ms: float, tolerance: float) -> None:
        self._calls = calls
        self._least_ms = least_ms
        self._most_ms = most_ms
        self._tolerance = tolerance
        self._times: dict[Cache, list[float]] = {}
        self.spent_ms = 0.0
        self.is_finished = False

    def add_measurement(self, measurement: Sequence[tuple[Cache, Sample]]) -> None:
        """Takes further batches into account, each with its cache state."""
        for cache, sample in measurement:
            self._times.setdefault(cache, []).append(sample.time_ms)
            self.spent_ms += sample.time_ms * self._calls
        is_long = self.spent_ms >= self._least_ms
        is_steady = is_long and all(map(self._is_steady, self._times.values()))
        self.is_finished = is_steady or self.spent_ms >= self._most_ms

    def _is_steady(self, times: Sequence[float]) -> bool:
        """Returns whether the last third of a run agrees with the third before it."""
        third = len(times) // 3
        if third < STRETCH:
            return False
        last, before = times[-third:], times[-2 * third : -third]
        return bool(abs(np.median(last) / np.median(before) - 1) < self._tolerance)


@dataclass(frozen=True)
class SteadyTime:
    """A candidate's steady time by one sustained run."""

    time_ms: float
    """The geometric mean over the cache states, brought to the power limit if it was read."""
    clock_mhz: float | None


def steady_time(ran: Sequence[tuple[Cache, Sample]], board: GpuState) -> SteadyTime:
    """Returns the time of one sustained run, from the batches at the candidate's own clock.

    A power controller lets one run draw somewhat more than another. Where the board's power was
    read in the last two thirds of the run, the time is that at the power limit.

    Args:
        ran: its batches in their order, some of each cache state; none of them failed.
        board: a reading of the board with its power limit and its highest clock.
    """
    caches = sorted({cache for cache, _ in ran})
    steady = ran[-max(2 * len(caches), len(ran) // 3) :]
    level_ms = {
        cache: float(np.median([s.time_ms for c, s in steady if c == cache])) for cache in caches
    }
    relative = at_limit_ms(
        [s.time_ms / level_ms[cache] for cache, s in ran],
        [s.clock_mhz for _, s in ran],
        [s.power_w for _, s in ran],
        board,
        since=len(ran) // 3,
        within=FAR_FROM_LIMIT,
    )
    log = float(np.mean(np.log(list(level_ms.values()))))
    if relative:
        log += float(np.mean(np.log(relative)))
    clocks = [s.clock_mhz for _, s in steady if s.clock_mhz is not None]
    return SteadyTime(math.exp(log), float(np.median(clocks)) if clocks else None)


_SUSTAINED_BATCH_MS = 10.0
_PROBE_MS = 150.0
"""Milliseconds for which the leader runs alone to find out whether the board throttles."""
_CLOCK_DROP = 0.015
"""Share by which the probe's clock is lower than the highest if the board throttles."""
_LEAST_MS = 300.0
"""Least milliseconds of a sustained run; it goes on to three times that until it is steady."""
_MOST_SUSTAINED = 4
"""The most candidates with sustained runs, not counting picked ones."""
_STEADY = 0.015
"""Relative tolerance of a steady time. The power controller's oscillation makes an H200's runs
differ by 2 %, however long they are, so there are more runs rather than longer ones."""
_NEAR = 1.04
"""Largest time, relative to the fastest after the first pass, of a candidate that is measured
again."""


class SustainedRuns:
    """Sustained runs of candidates that have taken turns before."""

    def __init__(self, turns: JudgedTurns) -> None:
        self.turns = turns
        self.remarks: list[str] = []

    def truth(self, candidates: Sequence[Candidate], burst: Truth) -> Truth | None:
        """Returns the steady times of candidates that could be the fastest, and of those that were
        picked. Returns None if no sustained run succeeds, or, unless the settings say ``always``,
        if the clock holds in a sustained run of the fastest.
        """
        settings = self.turns.settings
        by_text = {c.text: c for c in candidates if c.text in burst.times_ms}
        probe = self._run(by_text[burst.best], _PROBE_MS, _PROBE_MS)
        if probe is None:
            return None
        if settings.solo == "throttled" and not self._throttled(probe, burst):
            self.remarks.append("the clock holds under load: sustained times not measured")
            return None
        # A candidate is at most a few percent faster in a sustained run than in turns. So one whose
        # time in turns is 10 % longer than the leader's steady time cannot win.
        limit = 1.1 * max(probe.time_ms, burst.times_ms[burst.best])
        order = sorted(burst.times_ms, key=burst.times_ms.__getitem__)
        wanted = [text for text in order if burst.times_ms[text] <= limit]
        wanted = wanted[:_MOST_SUSTAINED]
        wanted += [text for text in order if text in self.turns.picked and text not in wanted]
        return self._both_ways([by_text[text] for text in wanted])

    def _both_ways(self, candidates: Sequence[Candidate]) -> Truth | None:
        """Runs every candidate twice, the second time in mirrored order, and measures steady times.

        Candidates near the fastest, and those that were picked, then run twice again.
        """
        blocks: dict[str, list[float]] = {c.text: [] for c in candidates}
        self._pass(candidates, blocks)
        means = {text: math.prod(some) ** 0.5 for text, some in blocks.items() if len(some) == 2}
        if not means:
            return None
        limit = _NEAR * min(means.values())
        again = [
            c
            for c in candidates
            if c.text in means and (means[c.text] <= limit or c.text in self.turns.picked)
        ]
        if len(again) > 1:
            self._pass(again, blocks)
        complete = {c.text: blocks[c.text] for c in candidates if len(blocks[c.text]) > 1}
        return of_blocks(complete)

    def _pass(self, candidates: Sequence[Candidate], blocks: dict[str, list[float]]) -> None:
        for candidate in (*candidates, *reversed(candidates)):
            block = self._run(candidate, _LEAST_MS, 3 * _LEAST_MS)
            if block is not None:
                blocks[candidate.text].append(block.time_ms)

    def _throttled(self, probe: SteadyTime, burst: Truth) -> bool:
        known = [*self.turns.clocks_mhz]
        highest = self.turns.timer.state().max_clock_mhz
        if highest is not None:
            known.append(highest)
        if known and probe.clock_mhz is not None:
            return probe.clock_mhz < (1 - _CLOCK_DROP) * max(known)
        return probe.time_ms > (1 + _CLOCK_DROP) * burst.times_ms[burst.best]

    def _run(self, candidate: Candidate, least_ms: float, most_ms: float) -> SteadyTime | None:
        """Runs a candidate until its time is steady; returns None if it fails."""
        calls = self.turns.calls(candidate, _SUSTAINED_BATCH_MS)
        criterion = RunCriterion(calls, least_ms, most_ms, _STEADY)
        ran: list[tuple[Cache, Sample]] = []
        round_ms = len(CACHES) * calls * self.turns.rough_ms[candidate.text]
        while not criterion.is_finished:
            # One call of the timer runs all batches, because a power reading counts only if it lies
            # within one.
            stretch = max(STRETCH, math.ceil((least_ms - criterion.spent_ms) / round_ms))
            batches = [Batch(candidate, calls, cache) for cache in CACHES] * stretch
            samples = self.turns.timer.run(batches)
            for sample in samples:
                if not math.isfinite(sample.time_ms):
                    self.turns.failed[candidate.text] = sample.error or "fails to run"
                    return None
            new = [(batch.cache, s) for batch, s in zip(batches, samples, strict=True)]
            ran += new
            criterion.add_measurement(new)
            round_ms = criterion.spent_ms * len(CACHES) / len(ran)
        return steady_time(ran, self.turns.timer.state())
