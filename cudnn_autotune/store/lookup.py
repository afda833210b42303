"""What can be asked for decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines.configs import check_workspace_limit
from cudnn_autotune.engines.problem import ConvProblem, check_problem
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.strategy import check_mode_name
from cudnn_autotune.store.decision import Decision, key_of


class Lookup(ABC):
    """A store, or several of them."""

    def find(
        self,
        problem: ConvProblem,
        *,
        sampling: str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
    ) -> Decision | None:
        """What serves ``problem`` within ``workspace_limit`` (bytes; None: no limit), without
        timing anything (``Decision.restricted_to``); None where that must be measured first.

        Raises:
            TypeError, ValueError: naming the argument, and what is allowed.
        """
        _check_question(problem, sampling, workspace_limit, benchmark_limit)
        key = key_of(problem, sampling, benchmark_limit)
        return self._find(key, problem.deterministic, workspace_limit)

    @abstractmethod
    def _find(self, key: str, deterministic: bool, workspace_limit: int | None) -> Decision | None:
        """What of a ``Decision.key`` may serve under these constraints."""

    def get(
        self,
        problem: ConvProblem,
        *,
        sampling: str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
    ) -> Selection | None:
        """The selection of :meth:`find`; raises the same."""
        found = self.find(
            problem,
            sampling=sampling,
            workspace_limit=workspace_limit,
            benchmark_limit=benchmark_limit,
        )
        return None if found is None else found.selection


def _check_question(
    problem: object, sampling: object, workspace_limit: int | None, benchmark_limit: object
) -> None:
    """The arguments of ``find``. A mode need not be registered: it may have measured elsewhere.

    Raises:
        TypeError: ``problem`` is none; ValueError: what is wrong with another one.
    """
    check_problem(problem)
    check_mode_name(sampling, "sampling")
    check_workspace_limit(workspace_limit)
    Node(benchmark_limit, "benchmark_limit").integer()
