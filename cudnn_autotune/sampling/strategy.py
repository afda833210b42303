"""The interface of a sampling mode: a timer measures, the mode decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.timers.timer import Timer


@dataclass(frozen=True)
class Limits:
    """The bounds of what a sampling mode may spend."""

    benchmark_limit: int = 0
    """Most candidates of cuDNN that may be timed, in their order; 0: all."""
    budget_ms: float | None = None
    """Wall time in milliseconds that the choice may take, plan building included; None: no limit.
    Candidates beyond the budget are left out, and the evidence says so. PyTorch's own path (the
    heuristics' first plan where that is cuDNN) is timed whatever it costs. For ``online`` the
    budget bounds how long the caller's calls wait for building and checking, but not the turns."""


def check_mode_name(name: object, argument: str) -> str:
    """Returns ``name`` if a sampling mode may have it: it is part of the keys of decisions on disk.

    Raises:
        ValueError: the name is not allowed; the text names ``argument``.
    """
    if isinstance(name, str) and name and name.isprintable() and not set(name) & set('"\\'):
        return name
    raise ValueError(
        f"{argument} must be a printable text that is not empty, without quotes and backslashes, "
        f"got {name!r}"
    )


class Strategy(Protocol):
    """A sampling mode. ``name`` is what users pass as ``sampling=``."""

    @property
    def name(self) -> str: ...

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        """Chooses a candidate.

        Returns:
            The selection; None if no candidate runs, in which case ATen's convolution serves the
            problem.
        """
