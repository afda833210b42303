"""Sampling modes of the tests' own, registered as users register theirs."""

from __future__ import annotations

import threading

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.sampling import Candidates, Limits, Measurement, Selection, Timer

BUILT_IN_MODES = ca.sampling.names()
"""The names of the modes of the package."""
AT_ONCE = tuple(mode for mode in BUILT_IN_MODES if not ca.sampling.traits(mode).decides_later)
"""The names of those that choose by ``select``."""


class Hungriest:
    """The candidate that wants the most workspace."""

    name = "test_hungriest"

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        runnable = timer.runnable(candidates.all())
        most = max(runnable, key=lambda candidate: candidate.workspace_bytes)
        return Selection((Measurement(most, None, 0),), total_samples=0)


class Counting:
    """The first candidate that runs, after a while; counts how often it was asked.

    Raises ``error`` instead, if there is one.
    """

    name = "test_counting"

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.pause = threading.Event()  # never set: waiting on it takes the whole timeout

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.pause.wait(0.2)  # lets the other threads miss, too
        first = timer.runnable(candidates.all(), limit=1)
        return Selection((Measurement(first[0], None, 0),), total_samples=0)


class Nothing:
    """Finds that no candidate runs."""

    name = "test_nothing"

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        return None


class Without:
    """A way that is no engine of cuDNN; it claims one sample, so that its output is checked."""

    def __init__(self, candidate: ca.expert.Candidate) -> None:
        self.name = f"test_{candidate.text}"
        self._candidate = candidate

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        if self._candidate not in candidates.beyond() or not timer.runnable([self._candidate]):
            return None
        return Selection((Measurement(self._candidate, None, 1),), total_samples=1)


HUNGRIEST, COUNTING, NOTHING = Hungriest(), Counting(), Nothing()
ONLY_MATMUL, ONLY_ATEN = Without(MATMUL), Without(OWN_PATH)
for _strategy in (HUNGRIEST, COUNTING, NOTHING, ONLY_MATMUL, ONLY_ATEN):
    ca.sampling.register(_strategy)
