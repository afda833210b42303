"""A sampling mode with cuDNN's engines and ATen only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling import Limits, Selection, Strategy, Timer
from cudnn_autotune.sampling.strategy import Candidates

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._candidates, name)

    def beyond(self) -> Sequence[Candidate]:
        return _without_implementations(self._candidates.beyond())

    def similar(self) -> Sequence[Candidate]:
        return _without_implementations(self._candidates.similar())


def _without_implementations(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in candidates if not c.id.is_implementation]
