"""Where layers are tuned and judged: the GPU, through what users call, or a simulated one."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

DEVICE = 0


class Gpu:
    def __init__(self) -> None:
        import torch
        from online_mode.problems import warm_up

        torch.manual_seed(0)
        torch.backends.cudnn.allow_tf32 = True
        warm_up("cuda")

    def choose(self, problem: Any, mode: str, budget_ms: float | None) -> Any:
        """The ``Choice`` of a layer's first call. Raises RuntimeError where none was made."""
        import cudnn_autotune as ca
        from cudnn_autotune.tuning import tune_problem

        ca.forget()
        with ca.use_sampling(budget_ms=budget_ms):
            tune_problem.tune(problem, DEVICE, mode)
        return next(c for c in ca.choices() if (c.problem, c.sampling) == (problem, mode))

    def open(self, problem: Any) -> tuple[Any, list[Any]]:
        """(timer, all that is known to serve the problem)"""
        from common.sources import GpuSource

        timer, candidates = GpuSource(problem).open()
        return timer, [*candidates.all(), *candidates.beyond()]

    def close(self, timer: Any) -> None:
        timer.close()

    def tidy(self) -> None:
        import torch

        import cudnn_autotune as ca

        ca.forget()
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the device may be lost
            torch.cuda.empty_cache()


class Simulated:
    """As ``Gpu``; the store is real, and so is who is looked up in it."""

    def __init__(self) -> None:
        self._seed = 0

    def _timer(self, problem: Any) -> Any:
        from .simulated import timer_of

        self._seed += 1
        return timer_of(problem, self._seed)

    def choose(self, problem: Any, mode: str, budget_ms: float | None) -> Any:
        import cudnn_autotune as ca
        from cudnn_autotune import sampling
        from cudnn_autotune.sampling import Limits
        from cudnn_autotune.store import Decision, Provenance
        from cudnn_autotune.timers.offline.static_candidates import StaticCandidates
        from cudnn_autotune.tuning import remembering

        timer = self._timer(problem)
        offered = StaticCandidates(
            timer.candidates.all(), similar=remembering.similar(problem, DEVICE)
        )
        selection = sampling.get(mode).select(offered, timer, Limits(budget_ms=budget_ms))
        if selection is None:
            raise RuntimeError("no candidate runs")
        decision = Decision(problem, mode, 0, None, selection, provenance=Provenance.now())
        choice = ca.Choice(decision, DEVICE, tuning_ms=timer.elapsed_ms())
        remembering.commit(choice)
        return choice

    def open(self, problem: Any) -> tuple[Any, list[Any]]:
        timer = self._timer(problem)
        return timer, list(timer.candidates.all())

    def close(self, timer: Any) -> None:
        pass

    def tidy(self) -> None:
        pass


def backend_of(device: str) -> Gpu | Simulated:
    return Simulated() if device == "cpu" else Gpu()
