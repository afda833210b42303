"""The interface of a sampling mode: C++ measures, a strategy decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.timers.timer import Timer


@dataclass(frozen=True)
class Limits:
    """How much a strategy may spend."""

    benchmark_limit: int = 0
    """How many of cuDNN's candidates may be timed, in their order; 0 for all."""
    budget_ms: float | None = None
    """Wall time that the choice may take, plan building included, in milliseconds; None: the
    strategy's own. What cannot be afforded is left out, and the evidence says so; PyTorch's own
    path (the heuristics' first plan where that is cuDNN) is looked at whatever it takes. Of
    ``online`` what the caller's calls wait for: building and checking, not the turns."""


def check_mode_name(name: object, argument: str) -> str:
    """What a sampling mode may be called. It is part of the keys of decisions on disk.

    Raises:
        ValueError: naming ``argument``.
    """
    if isinstance(name, str) and name and name.isprintable() and not set(name) & set('"\\'):
        return name
    raise ValueError(
        f"{argument} must be a printable text that is not empty, without quotes and backslashes, "
        f"got {name!r}"
    )


class Strategy(Protocol):
    """A way of choosing. ``name`` is what users pass as ``sampling=``."""

    @property
    def name(self) -> str: ...

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        """Chooses. None where no candidate runs: ATen's convolution then serves the problem."""
