"""What a search came to."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.selection import Measurement, Selection


@dataclass(frozen=True)
class Outcome:
    """What a search came to; without a choice, PyTorch's own path serves the problem."""

    selection: Selection | None = None
    chosen: Measurement | None = None
    plan: _C.Plan | None = None
    relative_error: float | None = None
    rejected: tuple[tuple[str, float], ...] = ()
