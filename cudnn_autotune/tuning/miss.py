"""The miss handler: known? else enumerate -> sample -> check -> remember. On a hit no line of it
runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import QueriedCandidates, Tensors
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.online import Online
from cudnn_autotune.sampling.strategy import Limits, Strategy
from cudnn_autotune.store import later
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.tuning import choice_log, events, probing, remembering, settings, verdict
from cudnn_autotune.tuning.choice_log import Choice
from cudnn_autotune.tuning.online_calls import OnlinePolicy, OnlinePreparation
from cudnn_autotune.tuning.online_tuner import TUNER, Prepared, Trial
from cudnn_autotune.tuning.outcome import Outcome
from cudnn_autotune.tuning.serving import served_by

_log = logging.getLogger(__name__)


def choose(
    native: _C.ConvProblem,
    mode: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
    x: Tensor,
    w: Tensor,
    y: Tensor,
) -> tuple[str, _C.Plan | None, _C.OnlineTrial | None, Callable[[], None] | None]:
    """Chooses an engine for a problem that has none yet; called by C++, one at a time.

    Args:
        native, mode, workspace_limit (bytes, -1: no limit), benchmark_limit (0: all; below
            0: a probe's), device: the key of the choice.
        x, w, y: the forward's input, weight and output, on the device, in the problem's layout and
            dtype; the one that the operation writes may be overwritten.

    Returns:
        The choice's text, its plan where it is an engine of cuDNN, the trial that it leads where
        the decision is still to come, and what is to be done once others may choose.
    """
    with later.put_off() as changes:
        text, plan, trial = _choose(
            native, mode, workspace_limit, benchmark_limit, device, (x, w, y)
        )
    return text, plan, trial, partial(later.make_all, changes) if changes else None


def _choose(
    native: _C.ConvProblem,
    mode: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
    tensors: Tensors,
) -> tuple[str, _C.Plan | None, _C.OnlineTrial | None]:
    start = time.perf_counter()
    problem = ConvProblem.from_native(native)
    since = choice_log.generation(problem)
    is_probe = probing.is_probe(benchmark_limit)
    limit = None if workspace_limit < 0 else workspace_limit
    limits = Limits(benchmark_limit, settings.get_budget_ms())

    def remember(outcome: Outcome, source: remembering.Known | None = None) -> Choice:
        if source is not None:
            provenance = None if source.decision is None else source.decision.provenance
        else:
            is_measured = outcome.selection is not None and outcome.selection.total_samples > 0
            provenance = remembering.provenance_now(device) if is_measured else None
        choice = Choice(
            problem=problem,
            device=device,
            sampling=mode,
            workspace_limit=limit,
            benchmark_limit=benchmark_limit,
            text=outcome.chosen.candidate.text if outcome.chosen else ATEN.text,
            chosen=outcome.chosen,
            tuning_ms=(time.perf_counter() - start) * 1e3,
            selection=outcome.selection,
            relative_error=outcome.relative_error,
            rejected=outcome.rejected,
            origin="tuned" if source is None else source.origin,
            provenance=provenance,
        )
        if is_probe:
            probing.take(choice)
            return choice
        # What calls have decided is not taken back by another thread's first call.
        known = choice_log.find(choice)
        if choice.total_samples > 0 or known is None or known.total_samples == 0:
            if not choice_log.record(choice, since):
                return choice
            remembering.keep(choice)
        events.tell(choice)
        return choice

    known = remembering.find(problem, mode, limit, benchmark_limit, device)
    served = (
        None
        if known is None
        else served_by(native, problem, known, workspace_limit, device, tensors)
    )
    if known is not None and served is not None:
        choice = remember(served, source=known)
        return choice.text, served.plan, None
    strategy = sampling.get(probing.MODE if is_probe else mode)
    with events.SEARCHES.searching():
        outcome = _search(native, problem, strategy, limit, limits, device, tensors)
    choice = remember(outcome)
    trial = None
    if isinstance(strategy, Online) and outcome.chosen and not problem.deterministic:
        first, prepared = outcome.chosen.candidate, Prepared()
        preparation = OnlinePreparation(choice, first, outcome.plan, prepared, limits.budget_ms)
        trial = _C.OnlineTrial((choice.text, outcome.plan), preparation)
        policy = OnlinePolicy(choice, remember, prepared, since)
        TUNER.add(Trial(trial.schedule, first, policy, prepared))
    return choice.text, outcome.plan, trial


def _search(
    native: _C.ConvProblem,
    problem: ConvProblem,
    strategy: Strategy,
    workspace_limit: int | None,
    limits: Limits,
    device: int,
    tensors: Tensors,
) -> Outcome:
    try:
        search = _C.EngineSearch.on_device(native, device)
    except _C.CudnnError as error:
        # cuDNN has no such graph at all: ATen's case.
        _log.info("%s: %s", problem.text, str(error))
        return Outcome()
    timer = GpuTimer(problem, search, tensors)
    try:
        nearby = remembering.similar(problem, device)
        candidates = QueriedCandidates(search, problem, tensors, workspace_limit, nearby)
        if isinstance(strategy, Online):
            selection = strategy.first(candidates, timer)
        else:
            selection = strategy.select(candidates, timer, limits)
    except torch.OutOfMemoryError as error:
        # As text: who keeps log records would keep the error's frames, and with them the tensors.
        told = f"out of memory: {error}"
        _log.warning("%s: PyTorch serves it, the search ran %s", problem.text, told)
        return Outcome(timer.broken_off(told))
    except RuntimeError as error:
        # The device may be lost: what was learned so far goes along with the error.
        error.add_note(timer.progress_report(problem.text))
        raise
    finally:
        timer.close()  # the check and the plans take their workspace from here on, one at a time
    if selection is None:
        return Outcome(timer.broken_off("no candidate runs"))
    n = problem.spatial_dims
    asymmetric = problem.padding[:n] != problem.padding[n:]
    # Where nothing was searched, cuDNN's first plan is what PyTorch runs too, and as unchecked;
    # but padding that differs before and after is something that PyTorch never hands to cuDNN.
    chosen = selection.winner
    is_listed = chosen.candidate.engine is None or bool(chosen.candidate.heuristic_mode)
    if selection.total_samples == 0 and is_listed and not asymmetric:
        return Outcome(selection, chosen, timer.plans.get(chosen.candidate.text))
    return _first_right(problem, selection, timer.plans, workspace_limit, tensors)


def _first_right(
    problem: ConvProblem,
    selection: Selection,
    plans: Mapping[str, _C.Plan],
    workspace_limit: int | None,
    tensors: Tensors,
) -> Outcome:
    """The best of ``selection`` whose output is right; those before it are rejected."""
    rejected: list[tuple[str, float]] = []
    for timed in selection.ranking:
        text = timed.candidate.text
        plan = plans.get(text)
        if plan is None and timed.candidate.engine is not None:
            continue  # it did not build
        needs = 0 if plan is None else plan.workspace_bytes
        if workspace_limit is not None and needs > workspace_limit:
            continue  # of what no heuristic lists it is known only now
        error = verdict.error_of(problem, text, plan, tensors)
        if verdict.is_right(problem, text, error):
            return Outcome(selection, timed, plan, error, tuple(rejected))
        assert error is not None
        rejected.append((text, error))
    return Outcome(selection, rejected=tuple(rejected))
