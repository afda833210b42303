"""The miss handler: a known choice, else a search and a check of the output; then a commit.

A miss asks an ordered chain of sources:

1. pins, the agreement of ranks, and the store;
2. the provisional choice that serves already;
3. other sizes of the layer, if its sizes keep changing;
4. a search.

A locked store is followed by PyTorch's own path alone.

A choice is provisional if its search lacked resources that a later one may have
(``timers.lacking``), such as memory. C++ asks again after some calls, at growing intervals, and the
problem is tuned again once the resources are there.

No code of this file runs on a hit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.engines.candidates import QueriedCandidates
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import admits
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.lacking import NOTHING, Lacking, is_passing
from cudnn_autotune.timers.measuring import surrounded, telling_operands
from cudnn_autotune.tuning import (
    choice_log,
    compiling_ahead,
    deferred,
    events,
    own_path_floor,
    probing,
    remembering,
    settings,
)
from cudnn_autotune.tuning.checking import OutputChecks, examined, is_telling, refusal
from cudnn_autotune.tuning.choice import Choice, for_want_of, of_search, untimed
from cudnn_autotune.tuning.serving import Served, own_path, serve
from cudnn_autotune.tuning.source import Miss, Source, begin_trial

_log = logging.getLogger(__name__)
_searched: dict[tuple[int, ConvProblem], tuple[Selection | None, GpuTimer]] = {}
"""Results of finished searches (:func:`searched`), by thread id and problem."""


def choose(
    native: _C.ConvProblem,
    mode: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
    *tensors: Tensor,
    serving: _C.Plan | None = None,
) -> tuple[_C.Plan, _C.OnlineTrial | None, bool, Callable[[], None] | None]:
    """Chooses an engine for a problem that has none yet. C++ calls it, one call at a time.

    Args:
        native, mode, workspace_limit, benchmark_limit, device: The key of the choice
            (``Policy.of_call``).
        tensors: as ``engines.problem.Operands``, on the device, in the problem's layout and dtype;
            the result may be overwritten.
        serving: the plan that has served the calling thread provisionally.

    Returns:
        The choice's plan; the trial that decides later, in mode ``online``; whether the choice is
        provisional; and a function to call once other threads may tune.
    """
    mode = settings.registered_mode(mode)
    policy = Policy.of_call(mode, workspace_limit, benchmark_limit)
    miss = Miss(ConvProblem.from_native(native), policy, device, tensors, serving)
    with deferred.put_off() as changes:
        served, trial = _choose(miss)
    afterwards = partial(deferred.make_all, changes) if changes else None
    is_provisional = bool(served.choice.lacking) and not miss.is_probe
    return served.plan, trial, is_provisional, afterwards


def _choose(miss: Miss) -> tuple[Served, _C.OnlineTrial | None]:
    """Asks the sources in their order, and commits the first choice."""
    start_s = time.perf_counter()
    since = choice_log.generation(miss.problem)
    served = next(found for source in _SOURCES if (found := source(miss)) is not None)
    earlier, choice = miss.earlier, served.choice
    if served.is_earlier:
        if choice != earlier:
            remembering.commit(choice, since)
        return served, None
    if earlier is not None and choice.lacking and _is_no_better(choice, earlier):
        return replace(served, choice=earlier), None
    choice = replace(choice, tuning_ms=(time.perf_counter() - start_s) * 1e3)
    if miss.policy.probe is not None:
        probing.record(miss.policy.probe, choice)
        return replace(served, choice=choice), None
    begin = None if miss.problem.deterministic else served.begin_trial
    if begin is not None:  # the trial looks at all candidates, and reports its own lacks
        choice = for_want_of(choice, NOTHING)
    remembering.commit(choice, since)
    served = replace(served, choice=choice)
    return served, None if begin is None else begin(served, since)


def _is_no_better(new: Choice, earlier: Choice) -> bool:
    """Returns whether a new choice serves by the earlier one's candidate, and lacks the same."""
    return (new.text, new.origin, new.lacking) == (earlier.text, earlier.origin, earlier.lacking)


def _by_earlier(miss: Miss) -> Served | None:
    """Serves by the provisional choice, which becomes final if only its output's check was missing.
    Returns None if there is none, or the problem needs a new search: the lacking resources are
    there now, or the choice is wrong."""
    if (earlier := miss.earlier) is None:
        return None
    problem, text, lacks = earlier.problem, earlier.text, earlier.lacking
    if lacks.may_be_had(miss.device, partial(_builds, miss)):
        _log.info("%s: tuned again, because %s", problem.text, lacks)
        return None
    plan = miss.serving
    if plan is None or plan.text != text:
        try:
            plan = _C.build_plan(miss.problem.native(), text, miss.device)
        except _C.PlanError as failure:
            _log.info("%s: tuned again: %s", problem.text, str(failure))
            return None
    if lacks.check:
        checks = OutputChecks()
        if not checks.is_right(problem, text, plan, miss.tensors):
            return None
        if (error := checks.errors[text]) is not None:
            checked = replace(earlier, decision=replace(earlier.decision, relative_error=error))
            earlier = for_want_of(checked, replace(lacks, check=False))
    return Served(earlier, plan, is_earlier=True)


def _builds(miss: Miss, text: str) -> bool:
    """Returns whether a candidate builds and runs, or fails for a lasting reason."""
    try:
        plan = _C.build_plan(miss.problem.native(), text, miss.device)
    except _C.PlanError as failure:
        return not is_passing(str(failure))
    check = examined(miss.problem, text, plan, miss.tensors)
    return check.is_compared and not is_passing(check.failure)


def _by_known(miss: Miss) -> Served | None:
    """Serves by a pin, the ranks' agreement, or the store. An unfit choice leads to a search, or to
    PyTorch's own path."""
    known = remembering.find(miss.problem, miss.policy, miss.device)
    if known is None:
        return None
    with events.SEARCHES.searching():
        served = serve(known, miss.tensors, miss.serving)
    return served or _by_lock(miss) or _by_search(miss)


def _by_lock(miss: Miss) -> Served | None:
    """Serves by PyTorch's own path what a locked store lacks. It does not stand in the way of a
    mode that times nothing."""
    mode = probing.MODE if miss.is_probe else miss.policy.mode
    if not store_settings.is_locked() or not sampling.traits(mode).times:
        return None
    with IMPORTING:
        from cudnn_autotune.store import locked
    locked.missed("convolutions", miss.problem.text)
    entry, evidence = Measurement(OWN_PATH, None, 0), Evidence(rule=locked.REASON)
    decision = untimed(miss.problem, miss.policy, entry, evidence)
    choice = Choice(decision, miss.device, "missing")
    return Served(choice, own_path(miss.problem, miss.device), is_found=False)


def _by_neighbours(miss: Miss) -> Served | None:
    """Serves a new size by the choices for other sizes of its layer."""
    is_searched = miss.earlier is not None or miss.is_probe or settings.get_new_shapes() == "tune"
    if is_searched or not choice_log.is_measured_layer(miss.problem, miss.device):
        return None
    if not sampling.traits(miss.policy.mode).times:  # there is nothing to save
        return None
    with IMPORTING:
        from cudnn_autotune.tuning import serving_new_sizes
    return serving_new_sizes.find(miss)


def _by_search(miss: Miss) -> Served:
    with events.SEARCHES.searching():
        return _search(miss, probing.MODE if miss.is_probe else miss.policy.mode)


_SOURCES: tuple[Source, ...] = (
    _by_known,
    _by_lock,
    _by_earlier,
    _by_neighbours,
    _by_search,
)
"""The sources of a choice, in their order. The last one always serves."""


@contextmanager
def searched(problem: ConvProblem, selection: Selection | None, timer: GpuTimer) -> Iterator[None]:
    """Replaces searches of this thread for ``problem``, within the context, by ``selection`` and
    the plans that the closed ``timer`` has built."""
    key = (threading.get_ident(), problem)
    _searched[key] = (selection, timer)
    try:
        yield
    finally:
        del _searched[key]


def _search(miss: Miss, mode: str, *, times_own_path: bool = False) -> Served:
    """Searches, and checks the chosen candidate's output; returns PyTorch's own path if no
    candidate is right.

    Args:
        times_own_path: whether PyTorch's own path is timed in any case.
    """
    problem, strategy = miss.problem, sampling.get(mode)
    concluded = _searched.get((threading.get_ident(), problem))
    if concluded is not None and not miss.is_probe:
        return _concluded(miss, *concluded)
    try:
        search = _C.EngineList.on_device(problem.native(), miss.device)
    except _C.CudnnError as error:
        # cuDNN cannot express the problem as a graph, so ATen serves it.
        _log.info("%s: %s", problem.text, str(error))
        return _by_own_path(miss, lacks=Lacking(not_built=int(is_passing(str(error)))))
    compiling_ahead.start_backward(problem, miss.device, mode, miss.policy.workspace)
    begun = compiling_ahead.take(problem, miss.device)
    tensors, is_short = miss.tensors, False
    traits = sampling.traits(mode)
    if traits.decides_later:
        strategy = sampling.get("heuristic")  # it serves the first call
    elif traits.times:
        try:
            tensors = _to_measure_on(problem, tensors)
        except torch.OutOfMemoryError as error:
            _log.warning("%s: no timing, because memory is short: %s", problem.text, str(error))
            strategy, is_short = sampling.get("heuristic"), True
    timer = GpuTimer(problem, search, tensors, refusal=refusal(problem, tensors), begun=begun)
    if is_short:
        timer.lacks_memory()
    selection, why, floor_ms = None, "no candidate runs", None
    try:
        nearby = remembering.similar(problem, miss.device)
        candidates = QueriedCandidates(search, problem, miss.tensors, miss.policy.workspace, nearby)
        if not times_own_path:
            floor_ms = own_path_floor.floor_ms(problem, miss.policy, miss.device)
        limits = replace(miss.limits, own_path_floor_ms=floor_ms)
        selection = strategy.select(candidates, timer, limits)
    except torch.OutOfMemoryError as error:
        # A handler that keeps log records would keep an error's frames, and their tensors.
        why = f"out of memory: {error}"
        _log.warning("%s: PyTorch serves it, the search ran %s", problem.text, why)
        timer.lacks_memory()
    except RuntimeError as error:
        # The device may be lost, so the error carries the measurements before it.
        error.add_note(timer.progress_report(problem.text))
        raise
    finally:
        timer.close()  # from here on the check and the plans allocate their own workspace
    served = _concluded(replace(miss, tensors=tensors), selection, timer, why)
    if traits.decides_later and served.is_found:
        begin = partial(begin_trial, shortlist=traits.shortlist, budget_ms=miss.limits.budget_ms)
        return replace(served, begin_trial=begin)
    if served.has_unfit and floor_ms is not None:
        # An engine faster than PyTorch's own path is unfit, and others may be slower than that
        # path.
        return _search(miss, mode, times_own_path=True)
    return served


def _to_measure_on(problem: ConvProblem, tensors: Operands) -> Operands:
    """Returns the caller's operands, or random ones if those do not distinguish a right output from
    a wrong one. They do not show a fast engine either, since zeros draw less power. The result is
    another tensor, between unused memory.

    Raises:
        OutOfMemoryError: there is no memory for them. Timed candidates may not write to the
            caller's result, which has other tensors beside it.
    """
    if is_telling(problem, tensors):
        return surrounded(problem, tensors)
    return telling_operands(problem, tensors[0].device)


def _concluded(
    miss: Miss, selection: Selection | None, timer: GpuTimer, why: str = "no candidate runs"
) -> Served:
    """Serves by the best candidate of ``selection`` with a right output; better ones are rejected.
    Without a selection ``why`` is the reason."""
    if selection is None:
        return _by_own_path(miss, timer.broken_off(why), timer.lacking())
    checks, lacks = OutputChecks(), timer.lacking()
    is_checked = _needs_check(miss.problem, selection)
    for timed in selection.ranking:
        text = timed.candidate.text
        # A mode without timing does not build PyTorch's own path.
        plan = (
            own_path(miss.problem, miss.device) if text == OWN_PATH.text else timer.plans.get(text)
        )
        if plan is None:
            continue  # it did not build
        if is_checked:
            # The workspace of an unlisted engine is known only now.
            if not admits(miss.policy.workspace, plan.workspace_bytes):
                continue
            if not checks.is_right(miss.problem, text, plan, miss.tensors):
                if is_passing(checks.failures.get(text, "")):
                    lacks = lacks.and_build(text)
                continue
            lacks = replace(lacks, check=checks.errors[text] is None)
        found = (selection, checks, timed, lacks)
        choice = of_search(miss.problem, miss.policy, miss.device, *found)
        return Served(choice, plan, has_unfit=bool(checks.rejected or checks.failures))
    return _by_own_path(miss, selection, lacks, checks)


def _needs_check(problem: ConvProblem, selection: Selection) -> bool:
    """Returns whether the winner's output must be checked. It need not be if no candidate was timed
    and PyTorch would run the same plan: its own path or, without determinism, cuDNN's first one.
    PyTorch never uses cuDNN with different padding before and after, or with an epilogue."""
    winner = selection.winner.candidate
    is_cudnns_first = bool(winner.heuristic_mode) and (winner.is_unfused or not problem.is_fused)
    n = problem.spatial_dims
    is_symmetric = problem.padding[:n] == problem.padding[n:]
    is_own_path = winner.id.is_own_path
    is_trusted = is_own_path or (is_cudnns_first and not problem.deterministic)
    is_pytorchs = is_trusted and is_symmetric
    return selection.total_samples > 0 or not is_pytorchs


def _by_own_path(
    miss: Miss,
    selection: Selection | None = None,
    lacks: Lacking = NOTHING,
    checks: OutputChecks | None = None,
) -> Served:
    """Serves by PyTorch's own path, because a search has found no right candidate."""
    choice = of_search(miss.problem, miss.policy, miss.device, selection, checks, None, lacks)
    has_unfit = checks is not None and bool(checks.rejected or checks.failures)
    return Served(choice, own_path(miss.problem, miss.device), is_found=False, has_unfit=has_unfit)
