"""Where a problem's candidates run: the GPU, or, in a dry run, a simulated one."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Collection
from typing import Any

# What a dry run stands on: a board at its power limit, with engines that draw unlike power.
SIMULATED = "h200-capped"

# The modes of this package that are compared; all of them pick from one list of candidates.
MODES = ("heuristic", "sample_once", "till_stable", "race", "sustained", "auto")


class GpuSource:
    """Timers of one problem on the GPU that is here.

    Args:
        problem: a ``ConvProblem``.
        tensors: input, weight and output; None: normal random ones, a set for each timer.
    """

    def __init__(self, problem: Any, tensors: tuple[Any, Any, Any] | None = None) -> None:
        self.problem = problem
        self.tensors = tensors

    def open(self) -> tuple[Any, Any]:
        """(timer, candidates): nothing is built or timed yet."""
        from cudnn_autotune.engines.configs import open_search
        from cudnn_autotune.engines.queried import QueriedCandidates
        from cudnn_autotune.timers.gpu_timer import GpuTimer
        from cudnn_autotune.timers.measuring import operands

        tensors = self.tensors or operands(self.problem, "cuda:0")
        search = open_search(self.problem, 0)
        return (
            GpuTimer(self.problem, search, tensors),
            QueriedCandidates(search, self.problem, tensors),
        )

    def rest(self, timer: Any, seconds: float) -> None:
        """The GPU idles, cools, and may clock up again."""
        time.sleep(seconds)

    def close(self, timer: Any) -> None:
        """Frees the timer's workspace, and what the caller no longer holds."""
        import torch

        timer.close()
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the device may be lost
            torch.cuda.empty_cache()


class SimulatedSource:
    """The same on a simulated GPU, whose engines are invented: for dry runs only."""

    def __init__(self) -> None:
        self._seed = 0

    def open(self) -> tuple[Any, Any]:
        from common import simulated

        self._seed += 1
        timer = simulated.preset(SIMULATED, self._seed)
        return timer, timer.candidates

    def rest(self, timer: Any, seconds: float) -> None:
        end_ms = timer.elapsed_ms() + seconds * 1e3
        while timer.elapsed_ms() < end_ms:
            timer.state()  # reading the board takes virtual time, in which it idles

    def close(self, timer: Any) -> None:
        pass


Source = GpuSource | SimulatedSource


def source_of(request: dict[str, Any]) -> Source:
    """Of a worker's request: its ``device`` and its ``case``."""
    if request["device"] == "cpu":
        return SimulatedSource()
    import torch

    from cudnn_autotune.audit.layers import Case

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = True
    return GpuSource(Case(**request["case"]).problem())


def fast_listed(candidates: Any, picked: Collection[str] = ()) -> list[Any]:
    """What could be the fastest, and what was picked.

    What mode FALLBACK lists precompiled is left out where others are listed: no such config comes
    near the best (``fallback_mode.py``), and a single launch of some takes a second. So is
    PyTorch's own path where it is cuDNN: it is the first of the others under another name.
    """
    from cudnn_autotune.engines.configs import ATEN

    listed = list(candidates.all())
    hopeful = [c for c in listed if c.heuristic_mode in ("A", "B") or c.is_compiled]
    known = hopeful or listed
    known += [c for c in listed if c.text in picked and c not in known]
    known += [c for c in candidates.beyond() if c not in known]
    if candidates.aten_uses_cudnn and ATEN.text not in picked and len(known) > 1:
        known = [c for c in known if c.text != ATEN.text]
    return known


def select(source: Source, mode: str) -> Any:
    """One choice of ``mode`` through a timer of its own, as ``audit.model.Pick``; what it raises
    becomes the pick's ``error``."""
    from cudnn_autotune import sampling
    from cudnn_autotune.audit.model import Pick
    from cudnn_autotune.audit.picks import pick_of
    from cudnn_autotune.sampling.strategy import Limits

    timer = None
    try:
        timer, candidates = source.open()
        begin_ms = timer.elapsed_ms()
        selection = sampling.get(mode).select(candidates, timer, Limits())
        return pick_of(selection, timer.elapsed_ms() - begin_ms)
    except Exception as error:  # the other modes still count; the record names this one
        return Pick(error=failure(error))
    finally:
        if timer is not None:
            with contextlib.suppress(RuntimeError):
                source.close(timer)


def failure(error: BaseException) -> str:
    """One line of a record."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def shortened(pick: Any) -> dict[str, Any]:
    """A pick for a record, as plain JSON."""
    from cudnn_autotune.core import json_dataclass

    tree: dict[str, Any] = json_dataclass.encode(
        dataclasses.replace(pick, passed_over={}, lacking=())
    )
    return tree
