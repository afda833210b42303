"""A fixed list of candidates, as of a recording."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.problem import ConvProblem


class StaticCandidates:
    """A given list of candidates (an ``engines.candidates.Candidates``). Those that no heuristic
    mode lists are in the order in which :meth:`beyond` returns them, behind PyTorch's own path."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        aten_uses_cudnn: bool = True,
        similar: Sequence[Candidate] = (),
        problem: ConvProblem | None = None,
    ) -> None:
        self.problem = problem
        self._engines = sorted((c for c in candidates if c.heuristic_mode), key=lambda c: c.place)
        self._beyond = sorted(
            (c for c in candidates if not c.heuristic_mode), key=lambda c: c.text != ATEN.text
        )
        self.aten_uses_cudnn = aten_uses_cudnn
        self._similar = list(similar)

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        return [c for c in self._engines if c.heuristic_mode == heuristic_mode]

    def all(self) -> Sequence[Candidate]:
        return list(self._engines)

    def beyond(self) -> Sequence[Candidate]:
        """Returns the candidates that no heuristic mode lists, PyTorch's own path first."""
        return list(self._beyond)

    def similar(self) -> Sequence[Candidate]:
        return list(self._similar)
