"""What a recording consists of."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.timer import Cache, GpuState

Row = tuple[float | None, ...]
"""A value a candidate, in the recording's order; None: it took no part."""


@dataclass(frozen=True)
class RecordedCandidate:
    """A candidate and how it did in screening."""

    candidate: Candidate
    built: bool
    build_ms: float | None
    """Host time of building its plan, or of trying to; None: not tried. Of those that are compiled
    at run time only the first is timed, and stands for all."""
    first_run_ms: float | None
    """Its first call and the loading of its kernel before; None: it did not run."""
    warm_ms: float | None
    """Its second call; None where it did not run, or the first one was absurdly slow already."""
    error: str = ""
    """Why it did not build or run, or was not tried; of one that failed later on, what is there of
    its samples is kept, but no truth."""


@dataclass(frozen=True)
class Rounds:
    """Short batches of candidates that took turns."""

    calls: tuple[int, ...]
    """Of a batch, by candidate; 0: it took no part."""
    time_ms: tuple[Row, ...]
    """Milliseconds a call: round by round, by candidate."""
    clock_mhz: tuple[Row, ...]
    """Mean SM clock of each batch; None where it could not be told."""


@dataclass(frozen=True)
class SoloTrace:
    """A candidate that ran alone for long, right after rounds: batch after batch."""

    text: str
    cache: Cache
    calls: int
    """Of a batch."""
    at_ms: tuple[float, ...]
    """Time from the begin of the block to the middle of each batch."""
    time_ms: tuple[float, ...]
    """Milliseconds a call."""
    clock_mhz: Row
    power_w: Row | None
    """What the board drew meanwhile, as ``Sample.power_w``; None: kept by no recording of the
    file's version 1."""


@dataclass(frozen=True)
class Reading:
    """The board at some time."""

    at_ms: float
    """Wall time since the recording's timer was made."""
    phase: str
    """``start``, ``rounds``, or the text of the candidate that has just run alone."""
    state: GpuState
