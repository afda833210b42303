"""How ``recording.record`` goes about it.

It shares no loop with ``sampling``: raw samples must not inherit a strategy's cuts, or its bugs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.offline import solo_trace
from cudnn_autotune.timers.offline.recording_format import Recording
from cudnn_autotune.timers.offline.recording_parts import (
    Reading,
    RecordedCandidate,
    Rounds,
    Row,
    SoloTrace,
)
from cudnn_autotune.timers.offline.recording_screening import Screening
from cudnn_autotune.timers.timer import Batch, Cache, Sample, Timer

_SLOW_RATIO = 3.0
_SLOW_ROUNDS = 3
_MOST_CALLS = 64
_PASSES = 10
_ROUNDS_BEFORE_SOLO = 3
_SOLO_WITHIN = 1.25


class Recorder:
    """The state of one ``record``."""

    def __init__(
        self,
        timer: Timer,
        candidates: Sequence[Candidate],
        batch_ms: float,
        time_limit_ms: float,
        seed: int,
    ) -> None:
        self._timer = timer
        self._all = list(candidates)
        self._batch_ms = batch_ms
        self._limit_ms = time_limit_ms
        self._rng = random.Random(seed)
        self._screened: dict[str, RecordedCandidate] = {}
        self._calls: dict[str, int] = {}  # of a batch, for all that took part
        self._alive: set[str] = set()
        self._slow: set[str] = set()
        self._rows: dict[Cache, list[dict[str, Sample]]] = {"cold": [], "hot": []}
        self._lone: list[dict[str, float]] = []
        self._solo: list[SoloTrace] = []
        self._readings: list[Reading] = []
        self._overheads: list[float] = []
        self._threads = 1
        self.remarks: list[str] = []

    @property
    def complete_rounds(self) -> int:
        return len(self._rows["hot"])

    @property
    def runs(self) -> bool:
        """Whether any candidate takes part in rounds."""
        return bool(self._alive)

    def screen(self) -> None:
        self._read("start")
        screening = Screening(self._timer, self._limit_ms)
        screening.screen(self._all)
        self._screened = screening.recorded
        self._threads = screening.build_threads
        untried = sum(r.build_ms is None for r in self._screened.values())
        if untried:
            self.remarks.append(f"time limit: {untried} candidates were not tried")
        for text, recorded in self._screened.items():
            if recorded.warm_ms is not None:
                calls = math.ceil(self._batch_ms / recorded.warm_ms)
                self._calls[text] = min(max(calls, 1), _MOST_CALLS)
                self._alive.add(text)
                # Not against what is not cuDNN's: where that is far ahead, the engines' own order
                # still matters to the modes that know nothing else.
                if recorded.warm_ms > _SLOW_RATIO * screening.best_ms(engines_only=True):
                    self._slow.add(text)

    def run_passes(self, until_ms: float) -> None:
        """cuDNN's own search, first of all: it meets a cool board in real life, too.

        One candidate at a time, as of two with equal times it reports one only.
        """
        for number in range(_PASSES):
            if number and self._timer.elapsed_ms() >= until_ms:
                break
            times: dict[str, float] = {}
            for candidate in self._taking_part(self._members(), number):
                if candidate.engine is not None:
                    found = self._timer.frontend_find("sample_once", [candidate], 0)
                    times.update((t.candidate.text, t.time_ms) for t in found.ranking if t.time_ms)
            if times:
                self._lone.append(times)

    def run_rounds(self, rounds: int, until_ms: float) -> None:
        order = self._members()
        for number in range(rounds):
            if number and self._timer.elapsed_ms() >= until_ms:
                self.remarks.append(f"time limit: {number} of {rounds} rounds")
                break
            if number % 2 == 0:
                self._rng.shuffle(order)
            else:
                order.reverse()
            taking_part = self._taking_part(order, number)
            for cache in ("cold", "hot"):
                self._rows[cache].append(self._round(taking_part, cache))
        self._read("rounds")

    def _round(self, candidates: Sequence[Candidate], cache: Cache) -> dict[str, Sample]:
        batches = [Batch(c, self._calls[c.text], cache) for c in candidates]
        before_ms = self._timer.elapsed_ms()
        samples = self._timer.run(batches)
        wall_ms = self._timer.elapsed_ms() - before_ms
        ran: dict[str, Sample] = {}
        for batch, sample in zip(batches, samples, strict=True):
            wall_ms -= sample.time_ms * batch.calls
            if math.isfinite(sample.time_ms):
                ran[batch.candidate.text] = sample
            else:
                self._drop(batch.candidate.text, sample.error)
        if math.isfinite(wall_ms):
            self._overheads.append(max(0.0, wall_ms))
        return ran

    def run_solo(self, count: int, longest_ms: float) -> None:
        rows = self._rows["cold"]
        cold_ms = {
            c.text: statistics.median(row[c.text].time_ms for row in rows if c.text in row)
            for c in self._members()
            if any(c.text in row for row in rows)
        }
        if not cold_ms:
            return
        best_ms = min(cold_ms.values())
        leading = sorted(
            (c for c in self._members() if cold_ms.get(c.text, math.inf) <= _SOLO_WITHIN * best_ms),
            key=lambda c: cold_ms[c.text],
        )[:count]
        for number, candidate in enumerate(leading):
            left_ms = self._limit_ms - self._timer.elapsed_ms()
            if left_ms < min(solo_trace.CHUNK_MS, longest_ms):
                self.remarks.append(f"time limit: {number} of {len(leading)} sustained runs")
                break
            for _ in range(_ROUNDS_BEFORE_SOLO):
                self._round(self._taking_part(self._members(), _SLOW_ROUNDS), "cold")
            if candidate.text in self._alive:
                text = candidate.text
                trace, error = solo_trace.trace(
                    self._timer, candidate, cold_ms[text], min(longest_ms, left_ms)
                )
                self._solo += [trace] if trace else []
                if error:
                    self._drop(text, error)
                self._read(text)

    def _drop(self, text: str, error: str) -> None:
        if text in self._alive:
            self._alive.remove(text)
            failed = f"failed after {self.complete_rounds} rounds: {error or 'no reason given'}"
            self._screened[text] = replace(self._screened[text], error=failed)
            self.remarks.append(f"{text} {failed}")

    def _members(self) -> list[Candidate]:
        return [c for c in self._all if c.text in self._alive]

    def _taking_part(self, candidates: Sequence[Candidate], number: int) -> list[Candidate]:
        running = [c for c in candidates if c.text in self._alive]
        return [c for c in running if number < _SLOW_ROUNDS or c.text not in self._slow]

    def _read(self, phase: str) -> None:
        self._readings.append(Reading(self._timer.elapsed_ms(), phase, self._timer.state()))

    def recording(
        self,
        environment: Mapping[str, str | int | float | None],
        problem: ConvProblem,
        candidates: Candidates,
    ) -> Recording:
        return Recording(
            environment=environment,
            problem=problem,
            aten_uses_cudnn=candidates.aten_uses_cudnn,
            candidates=tuple(self._screened[c.text] for c in self._all),
            cold=self._rounds("cold"),
            hot=self._rounds("hot"),
            lone=tuple(tuple(p.get(c.text) for c in self._all) for p in self._lone),
            solo=tuple(self._solo),
            readings=tuple(self._readings),
            build_threads=self._threads,
            run_overhead_ms=statistics.median(self._overheads) if self._overheads else 0.0,
            remarks=tuple(self.remarks),
        )

    def _rounds(self, cache: Cache) -> Rounds:
        """The complete ones: cold and hot have equally many."""
        rows = self._rows[cache][: self.complete_rounds]

        def clock(row: dict[str, Sample], text: str) -> float | None:
            return row[text].clock_mhz if text in row else None

        texts = [c.text for c in self._all]
        times: list[Row] = [
            tuple(row[t].time_ms if t in row else None for t in texts) for row in rows
        ]
        clocks = tuple(tuple(clock(row, t) for t in texts) for row in rows)
        part = {t for t in texts if any(t in row for row in rows)}
        calls = tuple(self._calls[t] if t in part else 0 for t in texts)
        return Rounds(calls, tuple(times), clocks)
