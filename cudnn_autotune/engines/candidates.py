"""The candidates of one problem, as a sampling mode sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cudnn_autotune.engines.configs import Candidate


@dataclass(frozen=True)
class Work:
    """What one call of a problem does, however it is computed."""

    flops: float
    bytes: float
    """Of the three tensors."""
    device: str
    dtype: str


class Candidates(Protocol):
    """The candidates of one problem that the filters admit; asked of cuDNN when first needed."""

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        """Those that cuDNN's heuristic mode ``A``, ``B`` or ``FALLBACK`` lists first."""

    def all(self) -> Sequence[Candidate]:
        """Those of all three modes, in this order."""

    def beyond(self) -> Sequence[Candidate]:
        """Those that no heuristic lists: PyTorch's own path (``engines.ATEN``) first, always."""

    def similar(self) -> Sequence[Candidate]:
        """Those that were chosen for problems like this one, of the nearest problem first; listed
        by a heuristic or not."""

    @property
    def aten_uses_cudnn(self) -> bool:
        """Whether PyTorch's own path for the problem is cuDNN (its heuristics' first plan)."""

    @property
    def work(self) -> Work | None:
        """What the problem takes; None where that is not known."""
