"""A simulated GPU on which mode FALLBACK lists something: for dry runs only.

All of its engines are invented.
"""

from __future__ import annotations

import random
from typing import Any

BEST_MS = 0.05
# engine, numerical notes, behaviour notes, least and most of its time over BEST_MS
LAST = (
    (71, ("TENSOR_CORE",), ("RUNTIME_COMPILATION",), 0.7, 1.3),
    (57, ("TENSOR_CORE",), (), 0.9, 3.0),
    (1, (), (), 20.0, 1000.0),
)


class SimulatedFallback:
    """As ``common.sources.GpuSource``.

    Args:
        seed: other times of what mode FALLBACK lists.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def open(self) -> tuple[Any, Any]:
        """(timer, candidates)"""
        from common.simulated import (
            SimulatedEngine,
            SimulatedGpu,
            SimulatedTimer,
        )

        from cudnn_autotune.engines.configs import Candidate

        def engine(
            number: int,
            mode: str,
            ms: float,
            numerical: tuple[str, ...] = ("TENSOR_CORE",),
            behaviour: tuple[str, ...] = (),
        ) -> SimulatedEngine:
            text = f"eng{number}"
            candidate = Candidate(number, {}, 0, numerical, behaviour, text, mode, rank=number)
            return SimulatedEngine(candidate, ms, 100.0, build_ms=300.0 if behaviour else 5.0)

        source = random.Random(self.seed)
        listed = [engine(n, "A", BEST_MS * (1 + n / 50)) for n in range(20, 26)]
        last = [
            engine(n, "FALLBACK", BEST_MS * source.uniform(least, most), numerical, behaviour)
            for n, numerical, behaviour, least, most in LAST
        ]
        timer = SimulatedTimer(SimulatedGpu(name="simulated"), [*listed, *last], self.seed)
        return timer, timer.candidates

    def close(self, timer: Any) -> None:
        pass
