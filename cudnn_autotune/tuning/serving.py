"""Serves a problem by a known choice, which this process builds and checks first.

A decision of a store, of another rank or of an application was measured elsewhere, perhaps by an
older version, and files can be edited. So this machine verifies all of it that it can, and a
problem whose decision fails that is tuned again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.json_node import MOST
from cudnn_autotune.engines import offers, registry
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.engines.user_implementation import is_users
from cudnn_autotune.store import checked_outputs
from cudnn_autotune.tuning import prefetching, remembering
from cudnn_autotune.tuning.checking import tolerance
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.output_check import OutputChecks

_log = logging.getLogger(__name__)

# Reasons of fallbacks().
NO_LONGER_BUILDS = "a remembered choice no longer builds: tuned again"
NOT_ALLOWED = "a remembered choice is not allowed here: tuned again"
WRONG = "a remembered choice is wrong: tuned again"


class UnfitError(Exception):
    """A known choice must not serve; ``args`` are the reason for ``fallbacks()`` and the
    details."""


@dataclass(frozen=True)
class Served:
    """A choice that is ready to run."""

    choice: Choice
    plan: _C.Plan
    is_found: bool = True
    """False if a search found no candidate that is right, and PyTorch's own path serves."""


def serve(
    known: Choice, native: _C.ConvProblem, workspace_limit: int, tensors: Tensors
) -> Served | None:
    """Builds a known choice, and checks its output on ``tensors``, unless a process of this user
    has found it right before (``store.checked_outputs``).

    A pinned engine serves even where its output is wrong, with a warning. An engine of a neighbour
    that cannot serve is not counted, since nothing was remembered of this problem.

    Args:
        native: the problem.
        workspace_limit: bytes; -1: no limit.

    Returns:
        The choice, ready to run; None if the problem must be tuned after all, which is logged and
        counted in ``fallbacks()``.

    Raises:
        PlanError: what is pinned does not build.
    """
    problem, text, checks = known.problem, known.text, OutputChecks()
    prefetching.read_ahead(known)
    try:
        plan = built(known, native, workspace_limit, _search_on(native, known.device))
        is_kept = known.origin != "neighbour"  # of a new size no check is kept
        error = checked_outputs.error_of(problem.text, text, known.device) if is_kept else None
        is_right = error is not None and error <= tolerance(problem)
        if not is_right:
            is_right = checks.is_right(problem, text, plan, tensors)
            error = checks.errors[text]
        if not is_right and known.origin != "pinned":
            raise UnfitError(WRONG, f"its relative error is {error:.3g}")
    except UnfitError as unfit:
        reason, details = unfit.args
        if known.origin == "neighbour":
            _log.info("%s: %s of a neighbour does not serve: %s", problem.text, text, details)
            return None
        _C.count_fallback(reason)
        _log.warning("%s: %s (%s): %s (%s)", problem.text, text, known.origin, reason, details)
        remembering.reject(known)
        return None
    if not is_right:
        _log.warning("%s: %s serves all the same: it is pinned", problem.text, text)
    selection = known.decision.selection
    if known.origin in ("pinned", "neighbour"):
        candidate = replace(selection.winner.candidate, workspace_bytes=plan.workspace_bytes)
        selection = replace(selection, ranking=(Measurement(candidate, None, 0),))
    # A decision holds finite numbers only.
    error = None if error is None else min(error, MOST)
    decision = replace(known.decision, selection=selection, relative_error=error)
    return Served(replace(known, decision=decision), plan)


def during_capture(
    native: _C.ConvProblem,
    sampling: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
) -> _C.Plan | None:
    """Serves a problem by a known choice while a stream is being captured, when no output can be
    checked. Called by C++, with the key of the choice (workspace_limit in bytes, -1: no limit).

    Without a known choice the capture is served by what PyTorch would run, unchecked too. The next
    call outside a capture is served by :func:`serve`, which checks the output.

    Returns:
        The plan of a pin, or of a known choice whose output was right where it was tuned and that
        :func:`built` admits, unless it is of a user's implementation: that may be run in another
        process first, and what it compiles when it first runs may break the capture. None: the
        heuristics serve.
    """
    limit = None if workspace_limit < 0 else workspace_limit
    problem = ConvProblem.from_native(native)
    known = remembering.find(problem, sampling, limit, benchmark_limit, device)
    if known is None:
        return None
    is_pinned = known.origin == "pinned"
    error = known.relative_error
    if not is_pinned and (error is None or error > tolerance(problem) or is_users(known.text)):
        return None
    try:
        plan = built(known, native, workspace_limit, _search_on(native, device))
    except (UnfitError, _C.PlanError) as failure:
        _log.warning("%s: %s is not captured: %s", problem.text, known.text, failure.args[-1])
        return None
    if not is_pinned:
        message = "%s: %s is captured as remembered; its output is checked at the next call outside"
        _log.info(message, problem.text, known.text)
    return plan


def built(
    known: Choice,
    native: _C.ConvProblem,
    workspace_limit: int,
    open_search: Callable[[], _C.EngineSearch],
) -> _C.Plan:
    """The plan of a known choice.

    Args:
        native: the problem.
        workspace_limit: bytes; -1: no limit.
        open_search: opens cuDNN's engines for the problem.

    Raises:
        UnfitError: a choice that is not pinned does not build or violates what the problem asks
            for: by its workspace, by the notes that cuDNN or its implementation reports here, or
            by the errata.
        PlanError: what is pinned does not build.
    """
    text, notes = known.text, list[str]()
    is_pinned = known.origin == "pinned"
    build = partial(_C.build_plan, native, text, known.device)
    try:
        if _C.is_engine(text):  # the text decides: what else is remembered of it may be wrong
            search = open_search()
            here, build = search.describe(text), partial(search.build, text)
            notes = here.numerical_notes
            if not is_pinned and not _C.is_allowed(here, native, workspace_limit):
                raise UnfitError(NOT_ALLOWED, _needs(here.workspace_bytes, notes))
        elif registry.is_text(text) and not is_pinned:
            problem, gpu = ConvProblem.from_native(native), offers.gpu_of(known.device)
            offer = offers.described(text, problem, gpu)
            notes = list(offer.numerical_notes)
            if not offers.is_allowed(offer, problem, None):
                raise UnfitError(NOT_ALLOWED, _needs(offer.workspace_bytes, notes))
        plan = prefetching.take(native, text, known.device) or build()
    except (_C.PlanError, registry.ImplementationError, ValueError) as failure:
        if is_pinned:
            raise
        raise UnfitError(NO_LONGER_BUILDS, str(failure)) from None
    if not is_pinned and 0 <= workspace_limit < plan.workspace_bytes:
        raise UnfitError(NOT_ALLOWED, _needs(plan.workspace_bytes, notes))
    return plan


def _needs(workspace_bytes: int, notes: list[str]) -> str:
    return f"here it needs {workspace_bytes} bytes of workspace; notes: {', '.join(notes) or '-'}"


def _search_on(native: _C.ConvProblem, device: int) -> Callable[[], _C.EngineSearch]:
    return lambda: _C.EngineSearch.on_device(native, device)
