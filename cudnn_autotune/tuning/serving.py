"""Serves a problem by a known choice, which this process builds and checks first.

A decision of a store, of another rank or of an application was measured elsewhere, perhaps by an
older version, and files can be edited. So this machine verifies all of it that it can, and a
problem whose decision fails that, in whatever way, is tuned again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.json_node import MOST
from cudnn_autotune.engines import offers
from cudnn_autotune.engines.candidate_id import identify
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.engines.user_implementation import is_users
from cudnn_autotune.store import checked_outputs
from cudnn_autotune.timers.lacking import Lacking, is_passing
from cudnn_autotune.tuning import prefetching, remembering
from cudnn_autotune.tuning.checking import tolerance
from cudnn_autotune.tuning.choice import Choice, for_want_of
from cudnn_autotune.tuning.output_check import OutputChecks

_log = logging.getLogger(__name__)

_MOST_SHOWN = 1000  # characters of a text in the log

# Reasons of fallbacks().
NO_LONGER_BUILDS = "a remembered choice no longer builds: tuned again"
NOT_ALLOWED = "a remembered choice is not allowed here: tuned again"
WRONG = "a remembered choice is wrong: tuned again"


class UnfitError(Exception):
    """A known choice must not serve; ``args`` are the reason for ``fallbacks()`` and the
    details."""

    is_passing = False
    """Whether it may serve at another time, because it failed for a reason that may pass."""


@dataclass(frozen=True)
class Served:
    """A choice that is ready to run."""

    choice: Choice
    plan: _C.Plan
    is_found: bool = True
    """False if a search found no candidate that is right, and PyTorch's own path serves."""


def serve(
    known: Choice,
    native: _C.ConvProblem,
    workspace_limit: int,
    tensors: Tensors,
    plan: _C.Plan | None = None,
) -> Served | None:
    """Builds a known choice, and checks its output on ``tensors``, unless a process of this user
    has found it right before (``store.checked_outputs``). It is provisional if the output cannot be
    compared.

    Where the output can be compared neither on ``tensors`` nor, for want of memory, on random ones,
    the choice serves, and its relative error is None.

    A pinned engine serves even where its output is wrong, with a warning. An engine of a neighbour
    that cannot serve is not counted, since nothing was remembered of this problem.

    Args:
        native: the problem.
        workspace_limit: bytes; -1: no limit.
        plan: what serves provisionally, which is not built again if it is the choice's.

    Returns:
        The choice, ready to run; None if the problem must be tuned after all, which is logged and
        counted in ``fallbacks()``.

    Raises:
        PlanError: what is pinned does not build.
    """
    problem, text = known.problem, known.text
    prefetching.read_ahead(known)
    try:
        if plan is None or plan.text != text:
            plan = built(known, native, workspace_limit, _search_on(native, known.device))
        is_right, error = _checked(known, plan, tensors)
    except UnfitError as unfit:
        reason, details = unfit.args
        if known.origin == "neighbour":
            _log.info("%s: %s of a neighbour does not serve: %s", problem.text, text, details)
            return None
        _C.count_fallback(reason)
        named, why = _printable(text), _printable(details)
        _log.warning("%s: %s (%s): %s (%s)", problem.text, named, known.origin, reason, why)
        if not unfit.is_passing:
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
    # Ranks agree on what is provisional as well, and what is pinned is not looked at again.
    served = replace(known, decision=decision)
    if known.origin != "pinned" and error is None:
        served = for_want_of(served, Lacking(check=True))
    return Served(served, plan)


def _checked(known: Choice, plan: _C.Plan, tensors: Tensors) -> tuple[bool, float | None]:
    """Whether the output is right as far as it can be compared, and its relative error; raises
    UnfitError where it is wrong, unless the choice is pinned."""
    problem, text, checks = known.problem, known.text, OutputChecks()
    with _verifying(known):
        is_kept = known.origin != "neighbour"  # of a new size no check is kept
        error = checked_outputs.error_of(problem.text, text, known.device) if is_kept else None
        if error is not None and error <= tolerance(problem):
            return True, error
        is_right = checks.is_right(problem, text, plan, tensors)
    error = checks.errors[text]
    if not is_right and known.origin != "pinned":
        raise UnfitError(WRONG, f"its relative error is {error:.3g}")
    return is_right, error


@contextmanager
def _verifying(known: Choice) -> Iterator[None]:
    """Makes whatever goes wrong within the context an UnfitError, unless the choice is pinned: what
    is known may hold any texts and numbers, and a call is served in any case."""
    try:
        yield
    except UnfitError:
        raise
    except Exception as failure:
        if known.origin == "pinned":
            raise
        unfit = UnfitError(NO_LONGER_BUILDS, str(failure) or type(failure).__name__)
        # A GPU that is lost fails the search that follows, too.
        is_lost = isinstance(failure, torch.AcceleratorError)
        unfit.is_passing = is_lost or is_passing(str(failure))
        # As text, since a handler that keeps log records would keep the tensors of its frames.
        raise unfit from None


def _printable(text: str) -> str:
    """The beginning of a text of unknown origin, for the log."""
    return text[:_MOST_SHOWN].encode("utf-8", "backslashreplace").decode()


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
        The plan of a pin, or of a known choice whose output a process of this user has found right
        (``store.checked_outputs``) and that :func:`built` admits, unless it is of a user's
        implementation: that may be run in another process first, and what it compiles when it first
        runs may break the capture. None: the heuristics serve.
    """
    limit = None if workspace_limit < 0 else workspace_limit
    problem = ConvProblem.from_native(native)
    known = remembering.find(problem, sampling, limit, benchmark_limit, device)
    if known is None:
        return None
    is_pinned = known.origin == "pinned"
    error = checked_outputs.error_of(problem.text, known.text, device)
    if not is_pinned and (error is None or error > tolerance(problem) or is_users(known.text)):
        return None
    try:
        plan = built(known, native, workspace_limit, _search_on(native, device))
    except (UnfitError, _C.PlanError) as failure:
        named, why = _printable(known.text), _printable(failure.args[-1])
        _log.warning("%s: %s is not captured: %s", problem.text, named, why)
        return None
    if not is_pinned:
        _log.info("%s: %s is captured as remembered", problem.text, known.text)
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
    with _verifying(known):
        if identify(text).is_engine:  # the text decides: what else is remembered of it may be wrong
            search = open_search()
            here, build = search.describe(text), partial(search.build, text)
            notes = here.numerical_notes
            if not is_pinned and not _C.is_allowed(here, native, workspace_limit):
                raise UnfitError(NOT_ALLOWED, _needs(here.workspace_bytes, notes))
        elif identify(text).is_implementation and not is_pinned:
            problem, gpu = ConvProblem.from_native(native), offers.gpu_of(known.device)
            offer = offers.described(text, problem, gpu)
            notes = list(offer.numerical_notes)
            if not offers.is_allowed(offer, problem, None):
                raise UnfitError(NOT_ALLOWED, _needs(offer.workspace_bytes, notes))
        plan = prefetching.take(native, text, known.device) or build()
        if not is_pinned and 0 <= workspace_limit < plan.workspace_bytes:
            raise UnfitError(NOT_ALLOWED, _needs(plan.workspace_bytes, notes))
    return plan


def _needs(workspace_bytes: int, notes: list[str]) -> str:
    return f"here it needs {workspace_bytes} bytes of workspace; notes: {', '.join(notes) or '-'}"


def _search_on(native: _C.ConvProblem, device: int) -> Callable[[], _C.EngineSearch]:
    return lambda: _C.EngineSearch.on_device(native, device)
