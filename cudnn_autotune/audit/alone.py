"""Candidates alone, until the clock is steady.

A power controller hunts, so that a block runs somewhat above or below the power that the board is
held at. Where the power was read meanwhile, the blocks' times are brought to one power
(``steady_time.at_one_power``).

It shares no loop with ``sampling``: the judge must not inherit the cuts of whom it judges, or bugs.
It shares what a timer tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudnn_autotune.audit.judging import CACHES, JudgedTurns
from cudnn_autotune.audit.model import Truth
from cudnn_autotune.audit.pairing import of_blocks
from cudnn_autotune.audit.run_criterion import STRETCH, RunCriterion
from cudnn_autotune.audit.steady_time import SteadyTime, at_one_power, steady_time
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Batch, Cache, Sample

_BATCH_MS = 10.0
_NEAR = 1.04
"""Who is further from the fastest after a first pass is not measured again."""


class Alone:
    """Sustained runs of candidates that have taken turns before."""

    def __init__(self, turns: JudgedTurns) -> None:
        self.turns = turns
        self.clocks_mhz: list[float] = []
        """At the end of each block."""
        self.remarks: list[str] = []

    def sustained(self, candidates: Sequence[Candidate], burst: Truth) -> Truth | None:
        """Steady times of those that could lead at the steady clock, and of what was picked.

        None where nobody runs alone, or where it is not called for: the clock holds when the
        fastest runs alone, unless the settings say ``always``.
        """
        settings = self.turns.settings
        by_text = {c.text: c for c in candidates if c.text in burst.times_ms}
        probe = self._block(by_text[burst.best], settings.probe_ms, settings.probe_ms)
        if probe is None:
            return None
        if settings.solo == "throttled" and not self._throttled(probe, burst):
            self.remarks.append("the clock holds under load: sustained times not measured")
            return None
        # Nobody gets faster alone than between others, but for a few percent (the clock, held by
        # the power cap, no longer moves): whom the leader alone beats by 10 % is out.
        limit = 1.1 * max(probe.time_ms, burst.times_ms[burst.best])
        order = sorted(burst.times_ms, key=burst.times_ms.__getitem__)
        wanted = [text for text in order if burst.times_ms[text] <= limit]
        wanted = wanted[: settings.solo_candidates]
        wanted += [text for text in order if text in self.turns.picked and text not in wanted]
        return self._both_ways([by_text[text] for text in wanted])

    def _both_ways(self, candidates: Sequence[Candidate]) -> Truth | None:
        """Steady times: of two blocks each, the second in mirrored order; of as many again for
        those that are near the fastest or were picked."""
        blocks: dict[str, list[SteadyTime]] = {c.text: [] for c in candidates}
        self._pass(candidates, blocks)
        pairs = at_one_power({text: some for text, some in blocks.items() if len(some) == 2})
        means = {text: math.prod(times) ** 0.5 for text, times in pairs.items()}
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
        return of_blocks(at_one_power(complete))

    def _pass(self, candidates: Sequence[Candidate], blocks: dict[str, list[SteadyTime]]) -> None:
        least_ms = self.turns.settings.solo_ms
        for candidate in (*candidates, *reversed(candidates)):
            block = self._block(candidate, least_ms, 3 * least_ms)
            if block is not None:
                blocks[candidate.text].append(block)
                if block.clock_mhz is not None:
                    self.clocks_mhz.append(block.clock_mhz)

    def _throttled(self, probe: SteadyTime, burst: Truth) -> bool:
        known = [*self.turns.clocks_mhz]
        highest = self.turns.timer.state().max_clock_mhz
        if highest is not None:
            known.append(highest)
        drop = self.turns.settings.clock_drop
        if known and probe.clock_mhz is not None:
            return probe.clock_mhz < (1 - drop) * max(known)
        return probe.time_ms > (1 + drop) * burst.times_ms[burst.best]

    def _block(self, candidate: Candidate, least_ms: float, most_ms: float) -> SteadyTime | None:
        """Runs a candidate alone until its time is steady; returns None if it fails."""
        calls = self.turns.calls(candidate, _BATCH_MS)
        criterion = RunCriterion(calls, least_ms, most_ms)
        ran: list[tuple[Cache, Sample]] = []
        round_ms = len(CACHES) * calls * self.turns.rough_ms[candidate.text]
        while not criterion.is_finished():
            # One call runs all that is wanted: a power reading counts only if it lies within one.
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
        return steady_time(ran)
