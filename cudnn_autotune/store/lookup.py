"""What can be asked for decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cudnn_autotune.problem import ConvProblem
from cudnn_autotune.sampling.selection import Selection
from cudnn_autotune.store.decision import Decision


class Lookup(ABC):
    """A store, or several of them."""

    @abstractmethod
    def find(
        self,
        problem: ConvProblem,
        *,
        sampling: str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
    ) -> Decision | None:
        """What serves ``problem`` within ``workspace_limit`` (bytes; None: no limit), without
        timing anything (``Decision.under``); None where that must be measured first."""

    def get(
        self,
        problem: ConvProblem,
        *,
        sampling: str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
    ) -> Selection | None:
        """The selection of :meth:`find`."""
        found = self.find(
            problem,
            sampling=sampling,
            workspace_limit=workspace_limit,
            benchmark_limit=benchmark_limit,
        )
        return None if found is None else found.selection
