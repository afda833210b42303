"""All that a strategy may see of a GPU: one protocol, two sources.

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
    """Some calls of one candidate, one behind the other."""

    candidate: Candidate
    calls: int = 1
    cache: Cache = "cold"
    """``cold``: each call reads operands that left the L2 cache long ago (rotating buffers), and
    writes where the last one did; ``hot``: all calls run on the caller's own tensors."""


@dataclass(frozen=True)
class Sample:
    """What a batch took."""

    time_ms: float
    """Milliseconds a call; infinity where the candidate failed to run."""
    clock_mhz: float | None = None
    """Mean SM clock over the batch; None where it cannot be told."""
    error: str = ""
    """Why the candidate failed to run."""
    loading_ms: float = 0.0
    """Of a candidate's first run in a process, one call by itself: what loading its kernel took
    before, tens of milliseconds at times. It is no part of ``time_ms``."""
    power_w: float | None = None
    """What the board drew meanwhile, where it was read just then while its power limit held the
    clock: a reading is of some 25 ms, and a board takes one every 100 ms or so."""


class Timer(Protocol):
    """Builds, runs and times the candidates of one problem."""

    def runnable(self, candidates: Sequence[Candidate], limit: int = 0) -> list[Candidate]:
        """Those that build and whose workspace can be had, in their order.

        At most ``limit`` of them, 0 for all: with a limit, the rest is not built.
        """

    @property
    def build_threads(self) -> int:
        """How many plans that are compiled at run time build side by side."""

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Starts building candidates in the background; :meth:`runnable` waits for them."""

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        """Runs batches in their order, the GPU never waiting for the host in between.

        A candidate's first run, which loads its kernel, should be of one call in one batch. The
        call returns when the last batch is over. Candidates must be runnable.
        """

    def state(self) -> GpuState:
        """The board now."""

    def elapsed_ms(self) -> float:
        """Wall time since this timer was made: queries, building, measuring."""

    def frontend_find(
        self, technique: str, candidates: Sequence[Candidate], limit: int
    ) -> Selection:
        """cuDNN's own search (``cudnn_frontend::time_sorted_plan``) over runnable candidates.

        ``technique`` is ``sample_once``, ``median_of_three`` or ``till_stable``; ``limit`` ends it
        after so many candidates have run, 0 never. PyTorch's own path cannot be among them.
        """


def in_portions(
    candidates: Sequence[Candidate],
    limit: int,
    built: Callable[[Sequence[Candidate]], list[Candidate]],
) -> list[Candidate]:
    """What ``built`` returns of ``candidates``, for :meth:`Timer.runnable`: all at once without a
    limit (0), else no more at a time than are still missing."""
    found: list[Candidate] = []
    rest = list(candidates)
    while rest and (not limit or len(found) < limit):
        wanted = limit - len(found) if limit else len(rest)
        some, rest = rest[:wanted], rest[wanted:]
        found += built(some)
    return found
