"""Measures a problem's candidates through a timer and keeps the raw samples, for a replay.

:func:`record` has made the recordings that ship with the package, on a GPU:

1. Screening: each candidate is built and run once or twice.
2. Passes of cuDNN's own search.
3. Rounds: all candidates take turns, in random and then mirrored order, cold and hot.
4. Long sustained runs of the leading ones, each right after some rounds, as in a sampling mode.
"""

from __future__ import annotations

import datetime
import gzip
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from cudnn_autotune.audit.offline.recording import (
    ENVIRONMENT,
    FORMAT,
    VERSION,
    Reading,
    RecordedCandidate,
    Recording,
    Rounds,
    Row,
    SoloTrace,
)
from cudnn_autotune.core.json_dataclass import encode
from cudnn_autotune.core.versions import environment as this_environment
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_to_json
from cudnn_autotune.sampling.strategy import Candidates
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion
from cudnn_autotune.timers.timer import Batch, Cache, Sample, Timer
from cudnn_autotune.timers.turns import Turns

# The shares of the time limit at which cuDNN's search and the rounds end.
_PASSES_SHARE = 0.3
_ROUNDS_SHARE = 0.6
_PASSES = 10
# A first run up to 150 ms is always repeated; a longer one only up to ten times the fastest.
_REPEATED_MS = 150.0
_REPEATED_RATIO = 10.0
# Candidates three times slower than the fastest engine run in three rounds only.
_SLOW_RATIO = 3.0
_SLOW_ROUNDS = 3
_ROUNDS_BEFORE_SOLO = 3
_SOLO_WITHIN = 1.25
# A sustained run consists of timer runs of about 250 ms, in batches of about 10 ms.
_CHUNK_MS = 250.0
_SOLO_BATCH_MS = 10.0
_LEAST_MS = 600.0
"""The least GPU time of a sustained run, in milliseconds."""
_STEADY = 0.003
"""Time and clock of a sustained run are steady if they change by less than this (relative)."""


def record(
    timer: Timer,
    candidates: Candidates,
    problem: ConvProblem,
    *,
    rounds: int = 40,
    solo: int = 6,
    solo_ms: float = 2500.0,
    batch_ms: float = 1.0,
    time_limit_ms: float = 20_000.0,
    seed: int = 0,
) -> Recording:
    """Measures all candidates of ``problem``, PyTorch's own path included. One that fails does not
    run again.

    Args:
        timer: a new timer, through which nothing has run.
        rounds: number of rounds in each cache state.
        solo: how many of the leading ones run alone (of those within 25 % of the fastest).
        solo_ms: the longest sustained run; it ends earlier once time and clock are steady.
        batch_ms: approximate length of a candidate's batch in a round.
        time_limit_ms: wall time, plan building included; samples beyond it are left out, and a
            remark says so. Screening stops at it, cuDNN's search at 30 %, the rounds at 60 % of it;
            one pass and one round are always measured.
        seed: determines the order of candidates.

    Raises:
        ValueError: there is no candidate.
        RuntimeError: the timer's (device lost, out of memory).
    """
    every = [*candidates.all(), *candidates.beyond()]
    if not every:
        raise ValueError("candidates must not be empty")
    recorder = _Recorder(timer, every, batch_ms, time_limit_ms, seed)
    recorder.screen()
    recorder.run_passes(time_limit_ms * _PASSES_SHARE)
    recorder.run_rounds(rounds, time_limit_ms * (_ROUNDS_SHARE if solo else 1))
    recorder.run_solo(solo, solo_ms)
    return recorder.recording(problem, candidates)


def save(recording: Recording, path: Path) -> None:
    """Writes the file that :meth:`Recording.load` reads; compressed if its name ends in .gz."""
    tree = {"format": FORMAT, "version": VERSION, **encode(recording)}
    tree["problem"] = problem_to_json(recording.problem)
    data = (json.dumps(tree, separators=(",", ":"), allow_nan=False) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)


class _Recorder:
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
        self._turns = Turns(timer, seed)
        self._all = list(candidates)
        self._batch_ms = batch_ms
        self._limit_ms = time_limit_ms
        self._screened: dict[str, RecordedCandidate] = {}
        self._slow: set[str] = set()
        self._rows: dict[Cache, list[dict[str, Sample]]] = {"cold": [], "hot": []}
        self._lone: list[dict[str, float]] = []
        self._solo: list[SoloTrace] = []
        self._readings: list[Reading] = []
        self._overheads: list[float] = []
        self._remarks: list[str] = []

    @property
    def running(self) -> list[Candidate]:
        """The candidates that run twice in the screening and have not failed since."""
        known = self._turns.rough_ms
        return [c for c in self._all if c.text in known and not self._screened[c.text].error]

    def screen(self) -> None:
        """Builds each candidate and runs it once or twice; past the limit only until one runs."""
        self._read("start")
        for candidate in self._all:
            if not candidate.is_compiled and self._has_time(candidate):
                build_ms, built = self._build([candidate])
                self._run_first(candidate, build_ms, candidate in built)
        compiled = [c for c in self._all if c.is_compiled and self._has_time(c)]
        build_ms, built = self._build(compiled[:1])
        built += self._timer.runnable(compiled[1:])
        for candidate in compiled:
            if self._has_time(candidate):
                self._run_first(candidate, build_ms, candidate in built)
        untried = sum(r.build_ms is None for r in self._screened.values())
        if untried:
            self._remarks.append(f"time limit: {untried} candidates were not tried")
        # PyTorch's own path does not count here: even if it is far ahead, cuDNN's own techniques
        # compare only engines, so their order matters.
        warm_ms = {c.text: self._turns.rough_ms[c.text] for c in self.running}
        engines = [warm_ms[c.text] for c in self.running if c.engine is not None]
        limit = _SLOW_RATIO * min(engines, default=math.inf)
        self._slow = {text for text, time_ms in warm_ms.items() if time_ms > limit}

    def _has_time(self, candidate: Candidate) -> bool:
        if self._timer.elapsed_ms() < self._limit_ms or not self._turns.rough_ms:
            return True
        self._keep(candidate, False, error="not tried: time limit")
        return False

    def _build(self, candidates: Sequence[Candidate]) -> tuple[float, list[Candidate]]:
        if not candidates:
            return 0.0, []
        before_ms = self._timer.elapsed_ms()
        built = self._timer.runnable(candidates)
        return self._timer.elapsed_ms() - before_ms, built

    def _run_first(self, candidate: Candidate, build_ms: float, built: bool) -> None:
        first = warm = None
        error = "" if built else "does not build, or its workspace cannot be had"
        if built:
            first = self._turns.once(candidate)
            best_ms = min(self._turns.rough_ms.values(), default=math.inf)
            if first and first.time_ms <= max(_REPEATED_MS, _REPEATED_RATIO * best_ms):
                warm = self._turns.once(candidate)
            error = self._turns.failed.get(candidate.text, "")
        if warm:
            self._turns.rough_ms[candidate.text] = warm.time_ms
        self._keep(
            candidate,
            built,
            build_ms,
            first.loading_ms + first.time_ms if first else None,
            warm.time_ms if warm else None,
            error,
        )

    def _keep(
        self,
        candidate: Candidate,
        built: bool,
        build_ms: float | None = None,
        first_run_ms: float | None = None,
        warm_ms: float | None = None,
        error: str = "",
    ) -> None:
        own = {f.name: getattr(candidate, f.name) for f in fields(candidate)}
        self._screened[candidate.text] = RecordedCandidate(
            **own,
            built=built,
            build_ms=build_ms,
            first_run_ms=first_run_ms,
            warm_ms=warm_ms,
            error=error,
        )

    def run_passes(self, until_ms: float) -> None:
        """Runs cuDNN's own search before the rounds, because in use it also runs on a cool board.

        It gets one candidate at a time, because of two with equal times it reports only one.
        """
        for number in range(_PASSES):
            if number and self._timer.elapsed_ms() >= until_ms:
                break
            times: dict[str, float] = {}
            for candidate in self._of_round(number):
                if candidate.engine is not None:
                    found = self._timer.frontend_find("sample_once", [candidate], 0)
                    times.update((t.candidate.text, t.time_ms) for t in found.ranking if t.time_ms)
            if times:
                self._lone.append(times)

    def run_rounds(self, rounds: int, until_ms: float) -> None:
        for number in range(rounds):
            if number and self._timer.elapsed_ms() >= until_ms:
                self._remarks.append(f"time limit: {number} of {rounds} rounds")
                break
            order = self._turns.next_order(self._of_round(number))
            for cache in ("cold", "hot"):
                self._rows[cache].append(self._round(order, cache))
        self._read("rounds")

    def _of_round(self, number: int) -> list[Candidate]:
        """Returns the candidates of a round: slow ones run only in the first three."""
        return [c for c in self.running if number < _SLOW_ROUNDS or c.text not in self._slow]

    def _round(self, order: Sequence[Candidate], cache: Cache) -> dict[str, Sample]:
        before_ms = self._timer.elapsed_ms()
        ran = self._turns.round(order, cache, self._batch_ms)
        wall_ms = self._timer.elapsed_ms() - before_ms
        for candidate in order:
            if candidate.text in ran:
                calls = self._turns.calls(candidate, self._batch_ms)
                wall_ms -= ran[candidate.text].time_ms * calls
            else:
                self._drop(candidate.text)
        if len(ran) == len(order):
            self._overheads.append(max(0.0, wall_ms))
        return ran

    def run_solo(self, count: int, longest_ms: float) -> None:
        """Runs the leading candidates alone."""
        rows = self._rows["cold"]
        cold_ms = {
            c.text: statistics.median(row[c.text].time_ms for row in rows if c.text in row)
            for c in self.running
            if any(c.text in row for row in rows)
        }
        limit = _SOLO_WITHIN * min(cold_ms.values(), default=0.0)
        leading = [c for c in self.running if cold_ms.get(c.text, math.inf) <= limit]
        leading = sorted(leading, key=lambda c: cold_ms[c.text])[:count]
        for number, candidate in enumerate(leading):
            left_ms = self._limit_ms - self._timer.elapsed_ms()
            if left_ms < min(_CHUNK_MS, longest_ms):
                self._remarks.append(f"time limit: {number} of {len(leading)} sustained runs")
                break
            for _ in range(_ROUNDS_BEFORE_SOLO):
                self._round(self._of_round(_SLOW_ROUNDS), "cold")
            if candidate in self.running:
                self._trace(candidate, cold_ms[candidate.text], min(longest_ms, left_ms))
                self._read(candidate.text)

    def _trace(self, candidate: Candidate, time_ms: float, longest_ms: float) -> None:
        """Runs a candidate alone until it is steady, or until a run ends after ``longest_ms``."""
        text = candidate.text
        calls = math.ceil(_SOLO_BATCH_MS / time_ms)
        batches = max(1, round(min(_CHUNK_MS, longest_ms) / (calls * time_ms)))
        at_ms: list[float] = []
        samples: list[Sample] = []
        start_ms = self._timer.elapsed_ms()
        now_ms = 0.0
        criterion = TraceCriterion(calls)
        while (
            text not in self._turns.failed and now_ms < longest_ms and not criterion.is_finished()
        ):
            now_ms = self._timer.elapsed_ms() - start_ms
            known = len(samples)
            for sample in self._timer.run([Batch(candidate, calls)] * batches):
                if not math.isfinite(sample.time_ms):
                    self._turns.failed[text] = sample.error or "failed"
                    break
                at_ms.append(now_ms + sample.time_ms * calls / 2)
                now_ms += sample.time_ms * calls
                samples.append(sample)
            criterion.add_measurement(samples[known:])
        if samples:
            times = tuple(s.time_ms for s in samples)
            clocks = tuple(_whole(s.clock_mhz) for s in samples)
            powers = tuple(s.power_w for s in samples)
            trace = SoloTrace(text, "cold", calls, tuple(at_ms), times, clocks, powers)
            self._solo.append(trace)
        if text in self._turns.failed:
            self._drop(text)

    def _drop(self, text: str) -> None:
        """Records the failure of a candidate, which then does not run again."""
        failed = f"failed after {len(self._rows['hot'])} rounds: {self._turns.failed[text]}"
        self._screened[text] = replace(self._screened[text], error=failed)
        self._remarks.append(f"{text} {failed}")

    def _read(self, phase: str) -> None:
        state = self._timer.state()
        values = {f.name: getattr(state, f.name) for f in fields(state)}
        self._readings.append(Reading(at_ms=self._timer.elapsed_ms(), phase=phase, **values))

    def recording(self, problem: ConvProblem, candidates: Candidates) -> Recording:
        """Returns everything that was measured."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Recording(
            environment={**dict.fromkeys(ENVIRONMENT), **this_environment(), "date": date},
            problem=problem,
            aten_uses_cudnn=candidates.aten_uses_cudnn,
            candidates=tuple(self._screened[c.text] for c in self._all),
            cold=self._rounds("cold"),
            hot=self._rounds("hot"),
            lone=tuple(tuple(p.get(c.text) for c in self._all) for p in self._lone),
            solo=tuple(self._solo),
            readings=tuple(self._readings),
            build_threads=self._timer.build_threads,
            run_overhead_ms=statistics.median(self._overheads) if self._overheads else 0.0,
            remarks=tuple(self._remarks),
        )

    def _rounds(self, cache: Cache) -> Rounds:
        rows = self._rows[cache]
        times: list[Row] = []
        clocks: list[Row] = []
        for row in rows:
            samples = [row.get(c.text) for c in self._all]
            times.append(tuple(s.time_ms if s else None for s in samples))
            clocks.append(tuple(_whole(s.clock_mhz) if s else None for s in samples))
        took_part = {text for row in rows for text in row}
        calls = tuple(
            self._turns.calls(c, self._batch_ms) if c.text in took_part else 0 for c in self._all
        )
        return Rounds(calls, tuple(times), tuple(clocks))


class TraceCriterion(StoppingCriterion[Sequence[Sample]]):
    """Stops a run once its last quarter agrees with its second quarter, in time and clock."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._samples: list[Sample] = []

    def add_measurement(self, measurement: Sequence[Sample]) -> None:
        """Takes further batches of the run into account."""
        self._samples += measurement
        spent_ms = sum(sample.time_ms for sample in self._samples) * self._calls
        quarter = len(self._samples) // 4
        if spent_ms < _LEAST_MS or quarter < 2:
            return
        parts = self._samples[quarter : 2 * quarter], self._samples[-quarter:]
        times = [statistics.median(s.time_ms for s in part) for part in parts]
        clocks = [statistics.median(s.clock_mhz or 1.0 for s in part) for part in parts]
        if all(abs(late / early - 1) < _STEADY for early, late in (times, clocks)):
            self.reason = Reason.DECIDED


def _whole(clock_mhz: float | None) -> float | None:
    """Returns a clock in whole MHz, which takes less room in the file."""
    return None if clock_mhz is None else float(round(clock_mhz))
