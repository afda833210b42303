"""How much wall time is left."""

from __future__ import annotations

import math

from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.timer import Timer


class Budget:
    """``limits.budget_ms`` against the timer's own wall clock; without it, endless."""

    def __init__(self, timer: Timer, limits: Limits) -> None:
        self._timer = timer
        self._budget_ms = math.inf if limits.budget_ms is None else limits.budget_ms

    @property
    def is_limited(self) -> bool:
        return math.isfinite(self._budget_ms)

    def left_ms(self) -> float:
        return self._budget_ms - self._timer.elapsed_ms() if self.is_limited else math.inf

    def is_spent(self) -> bool:
        return self.left_ms() <= 0

    def affords(self, wall_ms: float) -> bool:
        return self.left_ms() >= wall_ms
