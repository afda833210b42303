"""The miss handler: a known choice, else a search and a check of the output; then a commit.

A new size of a layer whose sizes keep changing is served by the engine of an alike size, or by
PyTorch's own path, instead of a search (``new_sizes``). A trial that begins once it is called often
decides.

A choice that was made without something that a later search may have (``timers.lacking``), such as
memory, is provisional: after some calls, and then ever more of them, C++ asks again, and the
problem is tuned again once what was lacking can be had.

On a hit no code of this file runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.candidates import QueriedCandidates
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling import online
from cudnn_autotune.sampling.strategy import Limits, Shortlister
from cudnn_autotune.store import Policy
from cudnn_autotune.store.decision import admits
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.lacking import NOTHING, Lacking, is_passing
from cudnn_autotune.timers.measuring import surrounded, telling_operands
from cudnn_autotune.tuning import (
    aten_floor,
    choice_log,
    compiling_ahead,
    deferred,
    events,
    new_sizes,
    probing,
    remembering,
    settings,
)
from cudnn_autotune.tuning.checking import OutputChecks, examined, is_telling, refusal
from cudnn_autotune.tuning.choice import Choice, for_want_of, of_search, untimed
from cudnn_autotune.tuning.new_sizes import Nearby
from cudnn_autotune.tuning.online_calls import LazyPreparation, OnlinePreparation
from cudnn_autotune.tuning.online_tuner import TUNER, OnlineCommitter, Prepared, Trial
from cudnn_autotune.tuning.serving import Served, serve

_log = logging.getLogger(__name__)
# Stored decisions that are looked at for sizes that are alike. Other layers' may be nearer.
_MOST_STORED = 8
_searched: dict[tuple[int, ConvProblem], tuple[Selection | None, GpuTimer]] = {}
"""Results of searches that are over before they begin, by thread id and problem."""


@dataclass(frozen=True)
class _Miss:
    """A call whose problem has no engine yet, with the arguments of :func:`choose`."""

    problem: ConvProblem
    policy: Policy
    device: int
    tensors: Operands
    serving: _C.Plan | None = None

    @property
    def is_probe(self) -> bool:
        return self.policy.probe is not None

    @property
    def limits(self) -> Limits:
        return Limits(self.policy.benchmark, settings.get_budget_ms())


def choose(
    native: _C.ConvProblem,
    mode: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
    *tensors: Tensor,
    serving: _C.Plan | None = None,
) -> tuple[_C.Plan, _C.OnlineTrial | None, bool, Callable[[], None] | None]:
    """Chooses an engine for a problem that has none yet; called by C++, one at a time.

    Args:
        native, mode, workspace_limit, benchmark_limit, device: The key of the choice
            (``Policy.of_call``).
        tensors: as ``engines.problem.Operands``, on the device, in the problem's layout and dtype;
            the one that the operation writes may be overwritten.
        serving: the plan that has served the calling thread provisionally.

    Returns:
        The choice's plan; the trial that decides later, in the mode ``online``; whether the choice
        is provisional; and a function to call once other threads may tune.
    """
    mode = settings.registered_mode(mode)
    policy = Policy.of_call(mode, workspace_limit, benchmark_limit)
    miss = _Miss(ConvProblem.from_native(native), policy, device, tensors, serving)
    with deferred.put_off() as changes:
        served, trial = _choose(miss)
    afterwards = partial(deferred.make_all, changes) if changes else None
    is_provisional = bool(served.choice.lacking) and not miss.is_probe
    return served.plan, trial, is_provisional, afterwards


def _choose(miss: _Miss) -> tuple[Served, _C.OnlineTrial | None]:
    start_s = time.perf_counter()
    since = choice_log.generation(miss.problem)
    known = remembering.find(miss.problem, miss.policy, miss.device)
    # This process's choice may serve provisionally.
    made = choice_log.find(miss.problem, miss.policy, miss.device)
    earlier = made if made is not None and made.lacking else None
    if earlier is not None and known is None and (again := _unchanged(miss, earlier)) is not None:
        if again.choice != earlier:
            remembering.commit(again.choice, since)
        return again, None
    nearby = _fast_nearby(miss) if known is None and earlier is None else None
    served = _waited_for(miss, known) if nearby is None else _at_once(miss, nearby)
    if earlier is not None and served.choice.lacking and _is_no_better(served.choice, earlier):
        return replace(served, choice=earlier), None
    tuning_ms = (time.perf_counter() - start_s) * 1e3
    choice = replace(served.choice, tuning_ms=tuning_ms)
    if miss.policy.probe is not None:
        probing.record(miss.policy.probe, choice)
        return replace(served, choice=choice), None
    is_tried = served.is_found and _is_tried(miss, choice, nearby)
    if is_tried:  # the trial looks at all candidates, and says what it lacks itself
        choice = for_want_of(choice, NOTHING)
    remembering.commit(choice, since)
    served = replace(served, choice=choice)
    return served, _begin_trial(miss, served, since, nearby) if is_tried else None


def _is_no_better(new: Choice, earlier: Choice) -> bool:
    """Returns whether what serves after another look is what served before it, and lacks the
    same."""
    return (new.text, new.origin, new.lacking) == (earlier.text, earlier.origin, earlier.lacking)


def _unchanged(miss: _Miss, earlier: Choice) -> Served | None:
    """Serves by a provisional choice, which is final if its output was all that was not checked;
    returns None if the problem is to be searched for again: what was lacking can be had now, or the
    choice is wrong."""
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
    return Served(earlier, plan)


def _builds(miss: _Miss, text: str) -> bool:
    """Returns whether a candidate is built and runs, or fails for a reason that does not pass."""
    try:
        plan = _C.build_plan(miss.problem.native(), text, miss.device)
    except _C.PlanError as failure:
        return not is_passing(str(failure))
    verdict = examined(miss.problem, text, plan, miss.tensors)
    return verdict.is_compared and not is_passing(verdict.failure)


def _waited_for(miss: _Miss, known: Choice | None) -> Served:
    """Serves a call that waits for engines to be built, or timed: by what is known, or by a
    search."""
    with events.SEARCHES.searching():
        served = None if known is None else serve(known, miss.tensors, miss.serving)
        return served or _search(miss, probing.MODE if miss.is_probe else miss.policy.mode)


def _is_tried(miss: _Miss, first: Choice, nearby: Nearby | None) -> bool:
    """Returns whether later calls are to decide about the choice that serves the first one."""
    if nearby is not None:
        is_asked = settings.get_new_shapes() == "online" and not nearby.is_known
    else:
        is_asked = first.origin == "tuned" and sampling.traits(miss.policy.mode).decides_later
    return is_asked and not miss.problem.deterministic


def _fast_nearby(miss: _Miss) -> Nearby | None:
    """Returns what is known of a new size; None if it is to be searched for. Without timing there
    is nothing to save."""
    is_searched = miss.is_probe or settings.get_new_shapes() == "tune"
    if is_searched or not sampling.traits(miss.policy.mode).times:
        return None
    stored = partial(remembering.nearest, miss.problem, miss.device, _MOST_STORED)
    return new_sizes.fast_nearby(miss.problem, miss.device, stored)


def _at_once(miss: _Miss, nearby: Nearby) -> Served:
    """Serves a problem without timing: by the first candidate that is built quickly, allowed and
    right, else by PyTorch's own path."""
    for candidate in new_sizes.ready(nearby, miss.problem, miss.device):
        served = serve(_unmeasured(miss, candidate, "chosen for a similar problem"), miss.tensors)
        if served is not None:
            return served
    rule = "PyTorch's own path, until the size is measured"
    return Served(_unmeasured(miss, ATEN, rule), _own_path(miss))


def _unmeasured(miss: _Miss, candidate: Candidate, rule: str) -> Choice:
    entry = Measurement(replace(candidate, heuristic_mode=""), None, 0)
    evidence = Evidence(rule=rule, tied=(candidate.text,))
    return Choice(untimed(miss.problem, miss.policy, entry, evidence), miss.device, "neighbour")


def _begin_trial(
    miss: _Miss, first: Served, since: int, nearby: Nearby | None
) -> _C.OnlineTrial | None:
    """Begins a trial, whose first candidate serves until later calls have decided; returns None if
    the system gives no thread for it.

    Args:
        nearby: what is known of a new size, whose trial has few candidates, and begins once the
            problem is called often. Else None.
    """
    step = LazyPreparation()
    first_step = 2 if nearby is None else new_sizes.calls_before_trial(miss.problem, miss.device)
    trial = _C.OnlineTrial(first.plan, step, first_step)
    shortlist = sampling.traits(miss.policy.mode).shortlist if nearby is None else online.few
    assert shortlist is not None  # a mode that decides later has one
    # It must hold neither the trial, which holds it, nor the call's tensors.
    contenders = () if nearby is None else nearby.contenders
    begun_with = (trial.schedule, first, since, shortlist, contenders, miss.limits.budget_ms)
    step.begin = partial(_preparation, *begun_with)
    return trial if nearby is not None or step.start() else None


def _preparation(
    schedule: _C.TurnSchedule,
    first: Served,
    since: int,
    shortlist: Shortlister,
    nearby: Sequence[Candidate],
    budget_ms: float | None,
) -> OnlinePreparation:
    """Begins a trial on the tuner's thread, and returns the step that prepares it in the calls."""
    choice, prepared = first.choice, Prepared()
    assert choice.chosen is not None
    candidate, committer = choice.chosen.candidate, OnlineCommitter(choice, prepared, since)
    earlier = committer.earlier()
    TUNER.add(Trial(schedule, candidate, committer, prepared, earlier))
    return OnlinePreparation(
        choice, candidate, first.plan, prepared, shortlist, nearby, budget_ms, earlier
    )


@contextmanager
def searched(problem: ConvProblem, selection: Selection | None, timer: GpuTimer) -> Iterator[None]:
    """Within the context a search of this thread for ``problem`` is over before it begins: with
    ``selection``, and with the plans that the closed ``timer`` has built."""
    key = (threading.get_ident(), problem)
    _searched[key] = (selection, timer)
    try:
        yield
    finally:
        del _searched[key]


def _search(miss: _Miss, mode: str, *, times_aten: bool = False) -> Served:
    """Searches, and checks the chosen candidate's output; returns PyTorch's own path if none is
    right.

    Args:
        times_aten: whether PyTorch's own path is timed in any case.
    """
    problem, strategy = miss.problem, sampling.get(mode)
    concluded = _searched.get((threading.get_ident(), problem))
    if concluded is not None and not miss.is_probe:
        return _concluded(miss, *concluded)
    try:
        search = _C.EngineSearch.on_device(problem.native(), miss.device)
    except _C.CudnnError as error:
        # cuDNN cannot express the problem as a graph, so ATen serves it.
        _log.info("%s: %s", problem.text, str(error))
        return _by_pytorch(miss, lacks=Lacking(not_built=int(is_passing(str(error)))))
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
            _log.warning("%s: nothing is timed, for want of memory: %s", problem.text, str(error))
            strategy, is_short = sampling.get("heuristic"), True
    timer = GpuTimer(problem, search, tensors, refusal=refusal(problem, tensors), begun=begun)
    if is_short:
        timer.lacks_memory()
    selection, why, floor_ms = None, "no candidate runs", None
    try:
        nearby = remembering.similar(problem, miss.device)
        candidates = QueriedCandidates(search, problem, miss.tensors, miss.policy.workspace, nearby)
        if not times_aten:
            floor_ms = aten_floor.floor_ms(problem, miss.policy, miss.device)
        limits = replace(miss.limits, aten_floor_ms=floor_ms)
        selection = strategy.select(candidates, timer, limits)
    except torch.OutOfMemoryError as error:
        # A handler that keeps log records would keep an error's frames, and their tensors.
        why = f"out of memory: {error}"
        _log.warning("%s: PyTorch serves it, the search ran %s", problem.text, why)
        timer.lacks_memory()
    except RuntimeError as error:
        # The device may be lost, so the error carries what was measured before it.
        error.add_note(timer.progress_report(problem.text))
        raise
    finally:
        timer.close()  # from here on the check and the plans allocate their own workspace
    served = _concluded(replace(miss, tensors=tensors), selection, timer, why)
    if served.has_unfit and floor_ms is not None:
        # An engine that was faster than PyTorch's own path is unfit, and others may be slower.
        return _search(miss, mode, times_aten=True)
    return served


def _to_measure_on(problem: ConvProblem, tensors: Operands) -> Operands:
    """Returns the caller's operands, or random ones if those do not tell a right output from a
    wrong one: they would not tell a fast engine from a slow one either, since zeros draw less
    power. The result is another tensor, between unused memory.

    Raises:
        OutOfMemoryError: there is no memory for them. What is timed may not write to the caller's
            result, beside which other tensors lie.
    """
    if is_telling(problem, tensors):
        return surrounded(problem, tensors)
    return telling_operands(problem, tensors[0].device)


def _concluded(
    miss: _Miss, selection: Selection | None, timer: GpuTimer, why: str = "no candidate runs"
) -> Served:
    """Serves by the best candidate of ``selection`` whose output is right; better ones are
    rejected. Without a selection ``why`` says so."""
    if selection is None:
        return _by_pytorch(miss, timer.broken_off(why), timer.lacking())
    checks, lacks = OutputChecks(), timer.lacking()
    is_checked = _needs_check(miss.problem, selection)
    for timed in selection.ranking:
        text = timed.candidate.text
        # A mode that times nothing does not build PyTorch's own path.
        plan = _own_path(miss) if text == ATEN.text else timer.plans.get(text)
        if plan is None:
            continue  # it did not build
        if is_checked:
            # The workspace of an engine that no heuristic lists is known only now.
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
    return _by_pytorch(miss, selection, lacks, checks)


def _needs_check(problem: ConvProblem, selection: Selection) -> bool:
    """Returns whether the winner's output must be checked. It need not be if nothing was timed and
    PyTorch would run the same plan unchecked: cuDNN's first one, unless padding differs before and
    after or the engine computes an epilogue, which PyTorch never passes to cuDNN, or it is to be
    deterministic."""
    winner = selection.winner.candidate
    is_cudnns_first = bool(winner.heuristic_mode) and (winner.is_unfused or not problem.is_fused)
    n = problem.spatial_dims
    is_symmetric = problem.padding[:n] == problem.padding[n:]
    is_own_path = winner.id.is_own_path
    is_trusted = is_own_path or (is_cudnns_first and not problem.deterministic)
    is_pytorchs = is_trusted and is_symmetric
    return selection.total_samples > 0 or not is_pytorchs


def _by_pytorch(
    miss: _Miss,
    selection: Selection | None = None,
    lacks: Lacking = NOTHING,
    checks: OutputChecks | None = None,
) -> Served:
    """Serves by PyTorch's own path, because a search has found no candidate that is right."""
    choice = of_search(miss.problem, miss.policy, miss.device, selection, checks, None, lacks)
    has_unfit = checks is not None and bool(checks.rejected or checks.failures)
    return Served(choice, _own_path(miss), is_found=False, has_unfit=has_unfit)


def _own_path(miss: _Miss) -> _C.Plan:
    return _C.build_plan(miss.problem.native(), ATEN.text, miss.device)
