"""The first part of a recording: which candidates build and run, and how fast at first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.offline.recording_parts import RecordedCandidate
from cudnn_autotune.timers.timer import Batch, Sample, Timer

_CUT_MS = 150.0  # a second run that takes less is always worth it
_CUT_RATIO = 10.0


class Screening:
    """Builds each candidate and runs it once, or twice; whatever ``limit_ms``, until one runs."""

    def __init__(self, timer: Timer, limit_ms: float) -> None:
        self._timer = timer
        self._limit_ms = limit_ms
        self.recorded: dict[str, RecordedCandidate] = {}
        self.build_threads = 1
        """How many plans the timer compiles side by side, as far as it can be told."""

    def screen(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            if not candidate.is_compiled and self._has_time(candidate):
                build_ms, built = self._build([candidate])
                self._run_once(candidate, build_ms, candidate in built)
        compiled = [c for c in candidates if c.is_compiled and self._has_time(c)]
        if compiled:
            build_ms, built = self._build(compiled[:1])
            together_ms, others = self._build(compiled[1:])
            if together_ms:
                count = len(compiled[1:])
                self.build_threads = max(1, round(min(build_ms / together_ms, 1) * count))
            for candidate in compiled:
                if self._has_time(candidate):
                    self._run_once(candidate, build_ms, candidate in [*built, *others])

    def _has_time(self, candidate: Candidate) -> bool:
        if self._timer.elapsed_ms() < self._limit_ms or self.best_ms() == math.inf:
            return True
        self.recorded[candidate.text] = RecordedCandidate(
            candidate, False, None, None, None, "not tried: time limit"
        )
        return False

    def best_ms(self, engines_only: bool = False) -> float:
        """The fastest second run; of cuDNN's engines, or of all."""
        recorded = self.recorded.values()
        some = [r for r in recorded if r.candidate.engine is not None or not engines_only]
        return min((r.warm_ms for r in some if r.warm_ms), default=math.inf)

    def _build(self, candidates: Sequence[Candidate]) -> tuple[float, list[Candidate]]:
        if not candidates:
            return 0.0, []
        before_ms = self._timer.elapsed_ms()
        built = self._timer.runnable(candidates)
        return self._timer.elapsed_ms() - before_ms, built

    def _run_once(self, candidate: Candidate, build_ms: float, built: bool) -> None:
        first_ms = warm_ms = None
        error = "" if built else "does not build, or its workspace cannot be had"
        if built:
            first, error = self._single(candidate)
            if first is not None:
                first_ms = first.loading_ms + first.time_ms
                if first.time_ms <= max(_CUT_MS, _CUT_RATIO * self.best_ms()):
                    second, error = self._single(candidate)
                    warm_ms = None if second is None else second.time_ms
        self.recorded[candidate.text] = RecordedCandidate(
            candidate, built, build_ms, first_ms, warm_ms, error
        )

    def _single(self, candidate: Candidate) -> tuple[Sample | None, str]:
        (sample,) = self._timer.run([Batch(candidate)])
        if math.isfinite(sample.time_ms):
            return sample, ""
        return None, sample.error or "failed"
