"""A sampling mode that leaves out what computes convolutions beside cuDNN's engines and ATen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_autotune.engines import registry
from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling import Limits, Selection, Strategy, Timer

NAME = "engines_alone"


@dataclass(frozen=True)
class EnginesAlone:
    """Another mode, on fewer candidates."""

    mode: Strategy
    name: str = NAME

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        return self.mode.select(_Engines(candidates), timer, limits)


class _Engines:
    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        return self._candidates.of_mode(heuristic_mode)

    def all(self) -> Sequence[Candidate]:
        return self._candidates.all()

    def beyond(self) -> Sequence[Candidate]:
        return _without_implementations(self._candidates.beyond())

    def similar(self) -> Sequence[Candidate]:
        return _without_implementations(self._candidates.similar())

    @property
    def aten_uses_cudnn(self) -> bool:
        return self._candidates.aten_uses_cudnn


def _without_implementations(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in candidates if not registry.is_text(c.text)]
