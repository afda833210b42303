"""The protocol by which a sampling mode measures a GPU, with two implementations.

``gpu_timer.GpuTimer`` measures, and ``replay.ReplayTimer`` plays a recording back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.timers.telemetry import GpuState

__all__ = ["Batch", "Cache", "GpuState", "Sample", "Timer", "in_portions"]

Cache = Literal["cold", "hot"]


@dataclass(frozen=True)
class Batch:
    """A number of calls of one candidate, one after another."""

    candidate: Candidate
    calls: int = 1
    cache: Cache = "cold"
    """In a ``cold`` batch each call reads operands that have left the L2 cache (rotating buffers),
    and all write to one result. In a ``hot`` batch all calls use the caller's own tensors."""


@dataclass(frozen=True)
class Sample:
    """The measurement of one batch."""

    time_ms: float
    """Milliseconds of a call; infinity if the candidate failed to run."""
    clock_mhz: float | None = None
    """Mean SM clock during the batch; None: unknown."""
    error: str = ""
    """The reason why the candidate failed to run; empty if it ran."""
    loading_ms: float = 0.0
    """Milliseconds, sometimes tens, of loading the kernel before a candidate's first run in a
    process, if that is a batch of one call. ``time_ms`` does not include it."""
    power_w: float | None = None
    """The board's power during the batch, if a reading falls into it and the power limit held the
    clock. A reading covers some 25 ms, and there is one every 100 ms or so."""


class Timer(Protocol):
    """The protocol that builds, runs and times the candidates of one problem."""

    def runnable(self, candidates: Sequence[Candidate], limit: int = 0) -> list[Candidate]:
        """Builds candidates and returns those that build and for whose workspace there is memory.

        Args:
            limit: the most candidates to return, without building the rest; 0: all.
        """

    @property
    def build_threads(self) -> int:
        """The number of threads that compile plans at run time."""

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Starts building candidates in the background; :meth:`runnable` waits for them."""

    def is_building(self) -> bool:
        """Returns whether :meth:`runnable` would have to wait for candidates of :meth:`prepare`."""

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        """Runs batches in their order and returns when the last one is over. The GPU does not wait
        for the host in between.

        Candidates must be runnable. A candidate's first run, which loads its kernel, should be a
        batch of one call.
        """

    def state(self) -> GpuState:
        """Reads the board."""

    def elapsed_ms(self) -> float:
        """Returns the wall time (ms) since this timer was made."""

    def frontend_find(
        self, technique: str, candidates: Sequence[Candidate], limit: int
    ) -> Selection:
        """Runs cuDNN's own search (``cudnn_frontend::time_sorted_plan``) over runnable candidates.

        Args:
            technique: ``sample_once``, ``median_of_three`` or ``till_stable``.
            candidates: engine configs of cuDNN.
            limit: the number of candidates after which the search ends; 0: none.
        """


def in_portions(
    candidates: Sequence[Candidate],
    limit: int,
    built: Callable[[Sequence[Candidate]], list[Candidate]],
) -> list[Candidate]:
    """Returns the candidates that ``built`` builds: all at once without a limit (0), else in
    portions of at most the number still missing."""
    found: list[Candidate] = []
    rest = list(candidates)
    while rest and (not limit or len(found) < limit):
        wanted = limit - len(found) if limit else len(rest)
        some, rest = rest[:wanted], rest[wanted:]
        found += built(some)
    return found
