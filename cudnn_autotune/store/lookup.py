"""The questions that a store, or several stores in layers, can answer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines.configs import check_workspace_limit
from cudnn_autotune.engines.problem import ConvProblem, check_problem
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.strategy import check_mode_name
from cudnn_autotune.store.decision import Decision, key_of


class Lookup(ABC):
    """The base class of what finds decisions: one store, or several of them."""

    def find(
        self,
        problem: ConvProblem,
        *,
        sampling: str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
    ) -> Decision | None:
        """Returns the decision that serves ``problem``, without timing anything.

        A decision that was measured under looser constraints is ranked again for these
        (``Decision.restricted_to``).

        Args:
            problem: The convolution; its ``deterministic`` constrains the candidates.
            sampling: The name of the mode that measured. It need not be registered in this process.
            workspace_limit: The most bytes of workspace; None means no limit.
            benchmark_limit: The most candidates that the mode was allowed to try; 0 means all.

        Returns:
            The decision, or None if the problem must be measured first.

        Raises:
            TypeError, ValueError: An argument is not allowed; the message names it and what is
                allowed.
        """
        _check_question(problem, sampling, workspace_limit, benchmark_limit)
        key = key_of(problem, sampling, benchmark_limit)
        return self._find(key, problem.deterministic, workspace_limit)

    @abstractmethod
    def _find(self, key: str, deterministic: bool, workspace_limit: int | None) -> Decision | None:
        """Returns the decision of ``key`` for these constraints, or None; see :meth:`find`."""

    def get(
        self,
        problem: ConvProblem,
        *,
        sampling: str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
    ) -> Selection | None:
        """Returns the selection of the decision that :meth:`find` returns, or None.

        The arguments and the errors are those of :meth:`find`.
        """
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
    """Checks the arguments of ``find``.

    Raises:
        TypeError: ``problem`` is not a ConvProblem.
        ValueError: Another argument is not allowed.
    """
    check_problem(problem)
    check_mode_name(sampling, "sampling")
    check_workspace_limit(workspace_limit)
    Node(benchmark_limit, "benchmark_limit").integer()
