"""The miss handler: enumerate -> sample -> remember. On a hit no line of it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from cudnn_autotune import sampling
from cudnn_autotune._extension import _C
from cudnn_autotune.choice_log import ATEN, Choice, record
from cudnn_autotune.engines import HEURISTIC_MODES, Candidate, query
from cudnn_autotune.problem import ConvProblem
from cudnn_autotune.sampling.gpu_timer import GpuTimer
from cudnn_autotune.sampling.selection import Selection

if TYPE_CHECKING:
    from cudnn_autotune import _C as _types


class QueriedCandidates:
    """The candidates of one search, asked mode by mode (``sampling.Candidates``)."""

    def __init__(
        self, search: _types.EngineSearch, problem: ConvProblem, workspace_limit: int | None
    ) -> None:
        self._ask: Callable[[str], list[Candidate]] = lambda mode: query(
            search, problem, [mode], workspace_limit=workspace_limit
        )
        self._by_mode: dict[str, list[Candidate]] = {}

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        if heuristic_mode not in self._by_mode:
            self._by_mode[heuristic_mode] = self._ask(heuristic_mode)
        return self._by_mode[heuristic_mode]

    def all(self) -> Sequence[Candidate]:
        return [c for mode in HEURISTIC_MODES for c in self.of_mode(mode)]


def choose(
    native: _types.ConvProblem,
    mode: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
) -> tuple[str, _types.Plan | None]:
    """Chooses an engine for a problem that has none yet; called by C++, one at a time.

    Args:
        native, mode, workspace_limit (bytes, -1: no limit), benchmark_limit (0: all), device: the
            key of the choice.
        x, w, y: the forward's input, weight and output, on the device, in the problem's layout and
            dtype; the one that the operation writes may be overwritten.

    Returns:
        The engine config's text and its plan, or ``("aten", None)`` where no config runs.
    """
    start = time.perf_counter()
    problem = ConvProblem.from_native(native)
    limit = None if workspace_limit < 0 else workspace_limit
    selection: Selection | None = None
    plans: dict[str, _types.Plan] = {}
    try:
        search = _C.EngineSearch.on_device(native, device)
    except _C.CudnnError:
        # cuDNN has no such graph at all (float64 in some directions, say): ATen's case.
        pass
    else:
        timer = GpuTimer(search, x, w, y)
        candidates = QueriedCandidates(search, problem, limit)
        selection = sampling.get(mode).select(candidates, timer, benchmark_limit)
        plans = timer.plans
    choice = _choice(problem, device, mode, limit, benchmark_limit, selection, start)
    record(choice)
    return choice.text, plans.get(choice.text)


def _choice(
    problem: ConvProblem,
    device: int,
    mode: str,
    workspace_limit: int | None,
    benchmark_limit: int,
    selection: Selection | None,
    start: float,
) -> Choice:
    winner = selection.winner if selection else None
    chosen = winner.candidate if winner else None
    return Choice(
        problem=problem,
        device=device,
        sampling=mode,
        workspace_limit=workspace_limit,
        benchmark_limit=benchmark_limit,
        text=chosen.text if chosen else ATEN,
        engine=chosen.engine if chosen else None,
        knobs=chosen.knobs if chosen else {},
        time_ms=winner.time_ms if winner else None,
        workspace_bytes=chosen.workspace_bytes if chosen else 0,
        samples=winner.samples if winner else 0,
        total_samples=selection.total_samples if selection else 0,
        candidates=len(selection.ranking) if selection else 0,
        tuning_ms=(time.perf_counter() - start) * 1e3,
        ranking=tuple((t.candidate.text, t.time_ms) for t in selection.ranking)
        if selection
        else (),
    )
