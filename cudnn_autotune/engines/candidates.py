"""The candidates of one problem, as a sampling mode sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import ConvProblem


class Candidates(Protocol):
    """The candidates of one problem. cuDNN is asked for them when they are first needed."""

    @property
    def problem(self) -> ConvProblem | None:
        """The problem, where it is known."""

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        """Returns the candidates of heuristic mode ``A``, ``B`` or ``FALLBACK`` that no mode before
        it lists."""

    def all(self) -> Sequence[Candidate]:
        """Returns the candidates of all three modes, in this order."""

    def beyond(self) -> Sequence[Candidate]:
        """Returns the candidates that no heuristic lists: PyTorch's own path (``ATEN``), then
        others, such as what implementations offer."""

    def similar(self) -> Sequence[Candidate]:
        """Returns the candidates that were chosen for similar problems, the nearest problem's
        first, whether a heuristic lists them or not."""

    @property
    def aten_uses_cudnn(self) -> bool:
        """Whether PyTorch's own path for the problem is cuDNN (its heuristics' first plan)."""
