"""The host time of building plans, in a timer whose time is virtual."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cudnn_autotune.engines.configs import Candidate

Build = tuple[Candidate, float]
"""A candidate, and the milliseconds that its build takes."""


class Builds:
    """Computes how long the host waits for builds, and which plans have been built or tried.

    As in ``gpu_timer``, plans that are compiled at run time share ``threads`` threads, and for one
    that builds in the background the host waits only for the rest of its build.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tried: set[str] = set()
        self._pending: set[str] = set()
        self._ready_at_ms = 0.0

    def tried(self, candidate: Candidate) -> bool:
        """Whether a candidate has been built, or was found not to build."""
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
        """Whether builds that :meth:`prepare` started are still under way."""
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
