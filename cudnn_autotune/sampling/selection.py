"""What a strategy decides, and on what grounds."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.engines import Candidate


@dataclass(frozen=True)
class Timed:
    """A candidate and the time that a strategy credits it with."""

    candidate: Candidate
    time_ms: float | None
    """Milliseconds a call; None where the strategy does not time."""
    samples: int
    """Timed launches behind ``time_ms``."""


@dataclass(frozen=True)
class Selection:
    """The outcome of a strategy: every candidate that it ranked, the chosen one first."""

    ranking: tuple[Timed, ...]
    total_samples: int
    """Timed launches of all candidates."""

    @property
    def winner(self) -> Timed:
        return self.ranking[0]
