"""Stand-ins for what a timer without a GPU lacks: a list of candidates, the time of builds, and
cuDNN's own search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cudnn_autotune.expert import OWN_PATH, Candidate, ConvProblem
from cudnn_autotune.sampling import Measurement, Selection


class StaticCandidates:
    """A given list of candidates (a ``sampling.Candidates``). Those that no heuristic
    mode lists are in the order in which :meth:`beyond` returns them, behind PyTorch's own path."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        aten_uses_cudnn: bool = True,
        similar: Sequence[Candidate] = (),
        problem: ConvProblem | None = None,
    ) -> None:
        self.problem = problem
        self._engines = sorted((c for c in candidates if c.heuristic_mode), key=lambda c: c.place)
        self._beyond = sorted(
            (c for c in candidates if not c.heuristic_mode), key=lambda c: c.text != OWN_PATH.text
        )
        self.aten_uses_cudnn = aten_uses_cudnn
        self._similar = list(similar)

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        return [c for c in self._engines if c.heuristic_mode == heuristic_mode]

    def all(self) -> Sequence[Candidate]:
        return list(self._engines)

    def beyond(self) -> Sequence[Candidate]:
        """Returns the candidates that no heuristic mode lists, PyTorch's own path first."""
        return list(self._beyond)

    def similar(self) -> Sequence[Candidate]:
        return list(self._similar)


Build = tuple[Candidate, float]
"""A candidate, and the milliseconds that its build takes."""


class Builds:
    """Computes how long the host waits for builds, and which plans have been built or tried.

    As in ``gpu_timer``, plans that are compiled at run time share ``threads`` threads. The host
    waits only for the rest of a build that began in the background.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tried: set[str] = set()
        self._pending: set[str] = set()
        self._ready_at_ms = 0.0

    def tried(self, candidate: Candidate) -> bool:
        """Returns whether a candidate has been built, or was found not to build."""
        return candidate.text in self._tried

    def prepare(self, builds: Sequence[Build], now_ms: float) -> float:
        """Starts builds in the background; returns the wait (ms) for those started before."""
        wait_ms = self._collect(now_ms)
        new = self._new(builds)
        if new:
            self._pending = {candidate.text for candidate, _ in new}
            self._ready_at_ms = now_ms + wait_ms + together_ms(new, self._threads)
        return wait_ms

    def is_pending(self, now_ms: float) -> bool:
        """Returns whether builds that :meth:`prepare` started are still under way."""
        return bool(self._pending) and self._ready_at_ms > now_ms

    def finish(self, builds: Sequence[Build], now_ms: float) -> float:
        """Builds what has not been built; returns the wait for it (ms)."""
        wait_ms = 0.0
        if any(candidate.text in self._pending for candidate, _ in builds):
            wait_ms = self._collect(now_ms)
        new = self._new(builds)
        self._tried.update(candidate.text for candidate, _ in new)
        return wait_ms + together_ms(new, self._threads)

    def _new(self, builds: Sequence[Build]) -> list[Build]:
        return [
            (c, ms) for c, ms in builds if c.text not in self._tried and c.text not in self._pending
        ]

    def _collect(self, now_ms: float) -> float:
        if not self._pending:
            return 0.0
        self._tried |= self._pending
        self._pending = set()
        return max(0.0, self._ready_at_ms - now_ms)


def together_ms(builds: Iterable[Build], threads: int) -> float:
    """Returns the wall time (ms) of builds whose own times are known."""
    plain_ms = 0.0
    busy_ms = [0.0] * threads
    for candidate, build_ms in builds:
        if candidate.is_compiled:
            busy_ms[busy_ms.index(min(busy_ms))] += build_ms
        else:
            plain_ms += build_ms
    return plain_ms + max(busy_ms)


_MOST_SAMPLES = 100
_IMPROVEMENT = 0.95

Launch = Callable[[Candidate], tuple[float, bool]]
"""Launches a candidate and waits; returns the milliseconds between its events, and whether it
ran."""


def frontend_find(
    technique: str, candidates: Sequence[Candidate], limit: int, launch: Launch
) -> Selection:
    """Times ``candidates`` one after the other and sorts them, as cuDNN's own search does.

    Its rules are those of cudnn-frontend 1.28, ``cudnn_frontend_find_plan.h``; ``gpu_timer`` calls
    the original.

    Each has one untimed launch; one that fails there is left out. ``till_stable`` stops at the
    first sample that is not at least 5 % faster than the best before it. The status of a timed
    launch is ignored, and of candidates with equal times only the first is kept (a ``std::set``
    ordered by time).

    Args:
        technique: ``sample_once``, ``median_of_three`` or ``till_stable``.
        limit: the number of candidates after which the search ends; 0: none.
    """
    by_time: dict[float, Measurement] = {}
    total_samples = ran = 0
    for candidate in candidates:
        if not launch(candidate)[1]:
            continue
        ran += 1
        time_ms, samples = _timed(technique, candidate, launch)
        total_samples += samples
        by_time.setdefault(time_ms, Measurement(candidate, time_ms, samples))
        if limit and ran >= limit:
            break
    return Selection(tuple(by_time[t] for t in sorted(by_time)), total_samples)


def _timed(technique: str, candidate: Candidate, launch: Launch) -> tuple[float, int]:
    if technique == "sample_once":
        return launch(candidate)[0], 1
    if technique == "median_of_three":
        return sorted(launch(candidate)[0] for _ in range(3))[1], 3
    best = launch(candidate)[0]
    for samples in range(2, _MOST_SAMPLES + 1):
        time_ms = launch(candidate)[0]
        improved = time_ms < _IMPROVEMENT * best
        best = min(best, time_ms)
        if not improved:
            return best, samples
    return best, _MOST_SAMPLES
