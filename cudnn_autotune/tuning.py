"""The miss handler: enumerate -> sample -> check -> remember. On a hit no line of it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cudnn_autotune import sampling
from cudnn_autotune._extension import _C
from cudnn_autotune.checking import relative_error, tolerance
from cudnn_autotune.choice_log import ATEN, Choice, record
from cudnn_autotune.engines import HEURISTIC_MODES, Candidate, query
from cudnn_autotune.problem import ConvProblem
from cudnn_autotune.sampling.gpu_timer import GpuTimer
from cudnn_autotune.sampling.selection import Selection, Timed

_log = logging.getLogger(__name__)


class QueriedCandidates:
    """The candidates of one search, asked mode by mode (``sampling.Candidates``)."""

    def __init__(
        self, search: _C.EngineSearch, problem: ConvProblem, workspace_limit: int | None
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


@dataclass(frozen=True)
class Outcome:
    """What a search came to; without a winner, ATen's convolution serves the problem."""

    ranking: tuple[Timed, ...] = ()
    total_samples: int = 0
    winner: Timed | None = None
    plan: _C.Plan | None = None
    relative_error: float | None = None
    struck: tuple[tuple[str, float], ...] = ()


def choose(
    native: _C.ConvProblem,
    mode: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
    x: Tensor,
    w: Tensor,
    y: Tensor,
) -> tuple[str, _C.Plan | None]:
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
    outcome = _search(native, problem, mode, limit, benchmark_limit, device, (x, w, y))
    winner = outcome.winner
    chosen = winner.candidate if winner else None
    choice = Choice(
        problem=problem,
        device=device,
        sampling=mode,
        workspace_limit=limit,
        benchmark_limit=benchmark_limit,
        text=chosen.text if chosen else ATEN,
        engine=chosen.engine if chosen else None,
        knobs=chosen.knobs if chosen else {},
        time_ms=winner.time_ms if winner else None,
        workspace_bytes=chosen.workspace_bytes if chosen else 0,
        samples=winner.samples if winner else 0,
        total_samples=outcome.total_samples,
        candidates=sum(timed.time_ms is not None for timed in outcome.ranking),
        tuning_ms=(time.perf_counter() - start) * 1e3,
        ranking=tuple(
            (timed.candidate.text, timed.time_ms)
            for timed in outcome.ranking
            if timed.time_ms is not None
        ),
        relative_error=outcome.relative_error,
        struck=outcome.struck,
    )
    record(choice)
    _log.debug("%s: %s by %s in %.1f ms", problem.text, choice.text, mode, choice.tuning_ms)
    return choice.text, outcome.plan


def _search(
    native: _C.ConvProblem,
    problem: ConvProblem,
    mode: str,
    workspace_limit: int | None,
    benchmark_limit: int,
    device: int,
    tensors: tuple[Tensor, Tensor, Tensor],
) -> Outcome:
    try:
        search = _C.EngineSearch.on_device(native, device)
    except _C.CudnnError as error:
        # cuDNN has no such graph at all: ATen's case.
        _log.info("%s: %s", problem.text, error)
        return Outcome()
    timer = GpuTimer(search, *tensors)
    candidates = QueriedCandidates(search, problem, workspace_limit)
    selection = sampling.get(mode).select(candidates, timer, benchmark_limit)
    if selection is None:
        return Outcome()
    n = problem.spatial_dims
    asymmetric = problem.padding[:n] != problem.padding[n:]
    # Where nothing was searched, cuDNN's first plan is what PyTorch runs too, and as unchecked;
    # but padding that differs before and after is something that PyTorch never hands to cuDNN.
    if selection.total_samples == 0 and not asymmetric:
        winner = selection.winner
        plan = timer.plans[winner.candidate.text]
        return Outcome(selection.ranking, 0, winner, plan)
    return _first_right(problem, selection, timer, tensors)


def _first_right(
    problem: ConvProblem,
    selection: Selection,
    timer: GpuTimer,
    tensors: tuple[Tensor, Tensor, Tensor],
) -> Outcome:
    """The fastest of ``selection`` whose output is right; those before it are struck."""
    timer.release_workspace()  # the plans take theirs from here on, one at a time
    struck: list[tuple[str, float]] = []
    for timed in selection.ranking:
        plan = timer.plans[timed.candidate.text]
        error = relative_error(problem, plan, *tensors)
        if error is None or error <= tolerance(problem):
            return Outcome(
                selection.ranking, selection.total_samples, timed, plan, error, tuple(struck)
            )
        struck.append((timed.candidate.text, error))
        _log.warning(
            "%s: %s is wrong (relative error %.3g) and was not chosen",
            problem.text,
            timed.candidate.text,
            error,
        )
    return Outcome(selection.ranking, selection.total_samples, struck=tuple(struck))
