"""The interface of a sampling mode: C++ measures, a strategy decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cudnn_autotune.engines import Candidate
from cudnn_autotune.sampling.selection import Selection
from cudnn_autotune.sampling.timer import Timer


class Candidates(Protocol):
    """The candidates of one problem that the filters admit; asked of cuDNN when first needed."""

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        """Those that cuDNN's heuristic mode ``A``, ``B`` or ``FALLBACK`` lists first."""

    def all(self) -> Sequence[Candidate]:
        """Those of all three modes, in this order."""


class Strategy(Protocol):
    """A way of choosing. ``name`` is what users pass as ``sampling=``."""

    @property
    def name(self) -> str: ...

    def select(
        self, candidates: Candidates, timer: Timer, benchmark_limit: int
    ) -> Selection | None:
        """Chooses. None where no candidate runs: ATen's convolution then serves the problem.

        ``benchmark_limit``: how many candidates may be timed, in their order; 0 for all.
        """
