"""A simulated GPU on which an engine has kernels that cuDNN does not list: for dry runs only.

All of its engines are invented.
"""

from __future__ import annotations

import random
from typing import Any

from .measure import kernels

OFFERED = 40  # values of KERNEL_CFG that build
BEST_LISTED_MS = 0.05


class SimulatedKernels:
    """As ``common.sources.GpuSource``.

    Args:
        engine: the one that is compiled at run time.
        seed: other times of its kernels.
    """

    def __init__(self, engine: int, seed: int) -> None:
        self.engine = engine
        self.seed = seed

    def open(self) -> tuple[Any, Any]:
        """(timer, candidates)"""
        from common.simulated import (
            SimulatedEngine,
            SimulatedGpu,
            SimulatedTimer,
        )

        from cudnn_autotune.engines.configs import Candidate

        def candidate(engine: int, text: str, mode: str, notes: tuple[str, ...] = ()) -> Candidate:
            return Candidate(engine, {}, 0, (), notes, text, mode, rank=engine)

        source = random.Random(self.seed)
        listed = [
            SimulatedEngine(candidate(n, f"eng{n}", "A"), BEST_LISTED_MS * (1 + n / 50), 100.0)
            for n in range(6)
        ]
        compiled = candidate(self.engine, f"eng{self.engine}", "B", ("RUNTIME_COMPILATION",))
        own = [
            SimulatedEngine(kernel, BEST_LISTED_MS * source.uniform(0.8, 1.6), 100.0, build_ms=300)
            for kernel in kernels(compiled, range(OFFERED)).values()
        ]
        timer = SimulatedTimer(SimulatedGpu(name="simulated"), [*listed, *own], self.seed)
        return timer, timer.candidates

    def close(self, timer: Any) -> None:
        pass
