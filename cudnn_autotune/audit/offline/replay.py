"""``ReplayTimer`` plays a recording back to a strategy."""

from __future__ import annotations

import dataclasses
import operator
import random
import statistics
from collections.abc import Sequence
from typing import Literal

from cudnn_autotune.audit.offline import recorded_times
from cudnn_autotune.audit.offline.recorded_times import MOST_AVERAGED, Played, SoloCurve
from cudnn_autotune.audit.offline.recording import RecordedCandidate, Recording
from cudnn_autotune.audit.offline.stand_ins import Build, Builds, StaticCandidates, frontend_find
from cudnn_autotune.expert import Candidate
from cudnn_autotune.sampling import Batch, Cache, GpuState, Sample, Selection, in_portions

_BLOCK_ROUNDS = 8
"""The number of rounds that are played in their order before the replay jumps to another round."""
_SOLO_FROM_MS = 4.0
"""Least milliseconds of a run alone that follows a trace; a shorter one has times of the rounds,
because no power controller reacts sooner."""
_LONG_MS = 40.0
"""Milliseconds of a run alone from which a candidate without a trace is named in ``missing``."""
_FEW_CALLS = 4
"""Number of calls of a slow candidate that take ``_LONG_MS``. It has times of the rounds,
however long it runs: modes give it only a call or two, and need no steady time of it."""
_PASSES_APART = 3
"""Number of adjacent recorded passes from which one search of cuDNN takes its samples, because a
disturbance of one pass affected many candidates."""
_slowdown = operator.attrgetter("slowdown")


class ReplayTimer:
    """Replays recorded samples in a new order (a ``sampling.Timer``).

    Candidates that take turns get times of one recorded round, then of the next, so that the
    disturbance of a round affects all of it. After eight rounds the replay jumps to another one (a
    block bootstrap: Künsch, Annals of Statistics 17, 1989). A candidate in a sustained run follows
    its recorded trace, with the trace's own scatter in a new order. A candidate without a trace
    follows the trace whose slowdown is the median, scaled by the two candidates' times in the
    rounds. At its times of the rounds it would beat every candidate that was recorded alone on a
    board that throttles.

    What was not recorded cannot be replayed: a batch of fewer calls than recorded is as quiet as
    the recorded one, and after a sustained run the rounds start cool again. The board's power is
    that of the trace that is played; in the rounds there is none. :attr:`missing` names the samples
    that a strategy needed and the recording lacks. ``seed`` determines the order of samples.
    """

    def __init__(self, recording: Recording, seed: int = 0) -> None:
        self.recording = recording
        self.candidates = StaticCandidates(
            [r.candidate for r in recording.candidates],
            recording.aten_uses_cudnn,
            problem=recording.problem,
        )
        self._rng = random.Random(seed)
        self._column = {r.text: i for i, r in enumerate(recording.candidates)}
        self._curves: dict[str, list[SoloCurve]] = {}
        self._bursts = recorded_times.bursts(recording)
        for trace in recorded_times.sound_traces(recording):
            self._curves.setdefault(trace.text, []).append(SoloCurve(trace, self._bursts))
        curves = sorted((c for each in self._curves.values() for c in each), key=_slowdown)
        self._typical = curves[len(curves) // 2] if curves else None
        self._elapsed_ms = 0.0
        self._call_overhead_ms = recorded_times.call_overhead_ms(recording)
        self._builds = Builds(recording.build_threads)
        self._loaded: set[str] = set()
        self._taken: set[tuple[str, Cache]] = set()
        self._block_left = 0
        self._round = 0
        self._next_round()
        self._alone = ("", 0.0)
        self._phase = "start"
        self._clock_mhz: float | None = None
        self._passes: dict[str, int] = {}
        self._missing: dict[str, None] = {}
        self._states: dict[str, GpuState] = {r.phase: r for r in recording.readings}
        in_turns = [r for r in recording.readings if r.phase in ("rounds", "start")]
        self._state: GpuState = in_turns[-1] if in_turns else GpuState()
        self._of_column: dict[tuple[str, int], list[float]] = {}

    @property
    def missing(self) -> tuple[str, ...]:
        """The samples that a strategy needed and the recording lacks, as ``a solo trace of
        eng67``."""
        return tuple(self._missing)

    def runnable(self, candidates: Sequence[Candidate], limit: int = 0) -> list[Candidate]:
        """Does as ``Timer.runnable``. A candidate that was not recorded does not build."""

        def built(some: Sequence[Candidate]) -> list[Candidate]:
            self._elapsed_ms += self._builds.finish(self._known(some), self._elapsed_ms)
            # One that failed to run is built; its first run in the replay fails, too.
            return [c for c in some if (recorded := self._recorded(c)) and recorded.built]

        return in_portions(candidates, limit, built)

    def is_building(self) -> bool:
        return self._builds.is_pending(self.elapsed_ms())

    @property
    def build_threads(self) -> int:
        return self.recording.build_threads

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        self._elapsed_ms += self._builds.prepare(self._known(candidates), self._elapsed_ms)

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        samples = [self._batch(b) for b in batches]
        self._elapsed_ms += self._call_overhead_ms * sum(b.calls for b in batches)
        return samples

    def state(self) -> GpuState:
        """Returns the recorded reading of the phase that is played, with the last clock."""
        state = self._states.get(self._phase, self._state)
        if self._clock_mhz is None:
            return state
        return dataclasses.replace(state, clock_mhz=self._clock_mhz)

    def elapsed_ms(self) -> float:
        return self._elapsed_ms

    def frontend_find(
        self, technique: str, candidates: Sequence[Candidate], limit: int
    ) -> Selection:
        first = self._rng.randrange(max(1, len(self.recording.lone)))
        self._passes = {c.text: first + self._rng.randrange(_PASSES_APART) for c in candidates}
        return frontend_find(technique, candidates, limit, self._launch)

    def truth(
        self, kind: Literal["burst", "sustained"] = "sustained", cache: Cache = "cold"
    ) -> dict[str, float]:
        """Returns milliseconds of a call, from all recorded samples, by the candidate's text: in
        the rounds (``burst``), or alone for long, of candidates with a solo trace
        (``sustained``)."""
        if kind == "burst":
            return dict(self._bursts[cache])
        return recorded_times.sustained_ms(self.recording, cache, self._bursts)

    def _recorded(self, candidate: Candidate) -> RecordedCandidate | None:
        column = self._column.get(candidate.text)
        return None if column is None else self.recording.candidates[column]

    def _known(self, candidates: Sequence[Candidate]) -> list[Build]:
        recorded = (self._recorded(c) for c in candidates)
        return [(r.candidate, r.build_ms or 0.0) for r in recorded if r]

    def _ready(self, recorded: RecordedCandidate) -> bool:
        return recorded.built and self._builds.tried(recorded.candidate)

    def _batch(self, batch: Batch) -> Sample:
        text = batch.candidate.text
        recorded = self._recorded(batch.candidate)
        if batch.candidate.engine is None:  # PyTorch's own path needs no plan
            if recorded is None or not recorded.built:
                self._missing[text] = None
                return Sample(float("inf"), error=f"{text} was not recorded")
        elif recorded is None or not self._ready(recorded):
            raise ValueError(f"batches: {text!r} is not runnable, or was not built")
        if recorded.error:
            return Sample(float("inf"), error=recorded.error)
        if self._alone[0] != text:
            self._alone = (text, 0.0)
        time_ms, clock_mhz, power_w = self._time(text, batch.calls, batch.cache)
        self._alone = (text, self._alone[1] + time_ms * batch.calls)
        self._clock_mhz = clock_mhz
        load_ms = self._load_ms(recorded)
        self._elapsed_ms += time_ms * batch.calls + load_ms
        return Sample(time_ms, clock_mhz, loading_ms=load_ms, power_w=power_w)

    def _load_ms(self, recorded: RecordedCandidate) -> float:
        """Returns the time of loading the kernel in the first run, and 0 from the second run on."""
        text = recorded.text
        if text in self._loaded:
            return 0.0
        self._loaded.add(text)
        return max(0.0, (recorded.first_run_ms or 0.0) - (recorded.warm_ms or float("inf")))

    def _time(self, text: str, calls: int, cache: Cache) -> Played:
        if (text, cache) in self._taken:
            self._next_round()
        self._taken.add((text, cache))
        time_ms, clock_mhz = self._round_time(text, calls, cache)
        alone_ms = self._alone[1]
        rounds = self.recording.cold if cache == "cold" else self.recording.hot
        long = alone_ms > 0 or calls > rounds.calls[self._column[text]]
        self._phase = "rounds"
        if long and alone_ms + calls * time_ms / 2 >= _SOLO_FROM_MS:
            if text in self._curves:
                self._phase = text
                curve = self._curves[text][self._round % len(self._curves[text])]
                return curve.play(self._rng, alone_ms, calls * time_ms, cache)
            is_quick = time_ms * _FEW_CALLS < _LONG_MS
            if is_quick and alone_ms >= _LONG_MS:
                self._missing[f"a solo trace of {text}"] = None
            if is_quick and self._typical is not None:
                self._phase = self._typical.text
                scale = self._typical.relative_ms(text, cache)
                played = self._typical.play(self._rng, alone_ms, calls * time_ms, cache)
                return played._replace(time_ms=played.time_ms * scale)
        return Played(time_ms, clock_mhz)

    def _round_time(self, text: str, calls: int, cache: Cache) -> tuple[float, float | None]:
        """Returns time and clock of a batch in this round.

        The time of a batch longer than the recorded one is the mean of this round and the next.
        """
        rounds = self.recording.cold if cache == "cold" else self.recording.hot
        column = self._column[text]
        count = len(rounds.time_ms)
        recorded_calls = rounds.calls[column] or 1
        wanted = min(-(-calls // recorded_calls), MOST_AVERAGED, max(count, 1))
        indices = [(self._round + i) % count for i in range(wanted)] if count else []
        times = [t for i in indices if (t := rounds.time_ms[i][column]) is not None]
        if times:
            clock_mhz = rounds.clock_mhz[indices[0]][column]
            return statistics.fmean(times), clock_mhz
        return self._any_time(column), None

    def _any_time(self, column: int) -> float:
        """Returns a time, from another round, of a candidate that has none in this round."""
        times = self._column_of("rounds", column)
        if times:
            return self._rng.choice(times)
        recorded = self.recording.candidates[column]
        time_ms = recorded.warm_ms or recorded.first_run_ms
        assert time_ms is not None  # a candidate without an error ran
        return time_ms

    def _column_of(self, kind: Literal["rounds", "lone"], column: int) -> list[float]:
        """Returns all times of a candidate in the rounds, or in single launches."""
        key = (kind, column)
        if key not in self._of_column:
            recording = self.recording
            rounds = (*recording.cold.time_ms, *recording.hot.time_ms)
            rows = rounds if kind == "rounds" else recording.lone
            self._of_column[key] = [t for row in rows if (t := row[column]) is not None]
        return self._of_column[key]

    def _next_round(self) -> None:
        count = max(1, len(self.recording.cold.time_ms))
        self._taken.clear()
        if self._block_left == 0:
            self._block_left = _BLOCK_ROUNDS
            self._round = self._rng.randrange(count)
        else:
            self._round = (self._round + 1) % count
        self._block_left -= 1

    def _launch(self, candidate: Candidate) -> tuple[float, bool]:
        """Returns the milliseconds that cuDNN's own search measures in a single launch, and whether
        it ran."""
        recorded = self._recorded(candidate)
        text = candidate.text
        if recorded is None or not self._ready(recorded):
            raise ValueError(f"candidates: {text!r} is not runnable, or was not built")
        if recorded.error:
            return 0.0, False
        column = self._column[text]
        lone = self.recording.lone
        row = lone[self._passes[text] % len(lone)] if lone else ()
        self._passes[text] += 1
        time_ms = row[column] if row else None
        if time_ms is None:
            others = self._column_of("lone", column)
            time_ms = self._rng.choice(others) if others else self._any_time(column)
        self._alone = (text, 0.0)
        load_ms = self._load_ms(recorded)
        self._elapsed_ms += time_ms + load_ms + self._call_overhead_ms
        return time_ms + load_ms, True
