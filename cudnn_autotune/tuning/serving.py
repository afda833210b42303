"""Serving a problem by what is known of it: built and checked by this process.

What a store says, or another rank, or what an application has shipped, was measured elsewhere, or
by an older version, and files can be edited: of all that this machine can verify nothing is
believed. What does not hold is tuned again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import ATEN, Candidate, parse_engine_text
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.tuning import remembering, verdict
from cudnn_autotune.tuning.checking import tolerance
from cudnn_autotune.tuning.outcome import Outcome
from cudnn_autotune.tuning.remembering import Known

_log = logging.getLogger(__name__)

# Reasons of fallbacks().
NO_LONGER_BUILDS = "a remembered choice no longer builds: tuned again"
NOT_ALLOWED = "a remembered choice is not allowed here: tuned again"
WRONG = "a remembered choice is wrong: tuned again"


class UnfitError(Exception):
    """What is known may not serve; ``args``: the reason for ``fallbacks()``, and what was found."""


def served_by(
    native: _C.ConvProblem,
    problem: ConvProblem,
    known: Known,
    workspace_limit: int,
    device: int,
    tensors: Tensors,
) -> Outcome | None:
    """What is known, built, and its output checked on ``tensors``; None where the problem must be
    tuned after all, of which the log and ``fallbacks()`` tell.

    What is pinned is an order: it serves all the same, with a warning where it is wrong.

    Args:
        workspace_limit: bytes; -1: no limit.

    Raises:
        CudnnError: what is pinned does not build.
    """
    decision = known.decision
    try:
        plan = built(known, native, workspace_limit, _search_on(native, device))
        error = verdict.error_of(problem, known.text, plan, tensors)
        is_right = verdict.is_right(problem, known.text, error)
        if decision is None:
            if not is_right:
                _log.warning("%s: %s serves all the same: it is pinned", problem.text, known.text)
            return Outcome(None, _forced(known.text, plan), plan, error)
        if not is_right:
            raise UnfitError(WRONG, f"its relative error is {error:.3g}")
    except UnfitError as unfit:
        reason, found = unfit.args
        _C.count_fallback(reason)
        _log.warning("%s: %s (%s): %s (%s)", problem.text, known.text, known.origin, reason, found)
        remembering.reject(known, device)
        return None
    return Outcome(decision.selection, decision.selection.winner, plan, error, decision.rejected)


def during_capture(
    native: _C.ConvProblem,
    sampling: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
) -> tuple[str, _C.Plan | None] | None:
    """What serves a problem while a stream is being captured, when no output can be checked. Called
    by C++, with the key of the choice (workspace_limit in bytes, -1: no limit).

    Else the capture would get whatever cuDNN's heuristics list first, which nobody has checked
    either. The next call outside a capture is served by :func:`served_by`, which checks the output.

    Returns:
        What is pinned, or what is known, was right where it was tuned, and :func:`built` admits:
        its text, and its plan where it is an engine of cuDNN. None: the heuristics serve.
    """
    limit = None if workspace_limit < 0 else workspace_limit
    problem = ConvProblem.from_native(native)
    known = remembering.find(problem, sampling, limit, benchmark_limit, device)
    if known is None:
        return None
    if known.decision is not None:
        error = known.decision.relative_error
        if error is None or error > tolerance(problem):
            return None
    try:
        plan = built(known, native, workspace_limit, _search_on(native, device))
    except (UnfitError, _C.CudnnError) as failure:
        found = failure.args[-1]
        _log.warning("%s: %s is not captured: %s", problem.text, known.text, found)
        return None
    if known.decision is not None:
        told = "%s: %s is captured as remembered; its output is checked at the next call outside"
        _log.info(told, problem.text, known.text)
    return known.text, plan


def built(
    known: Known,
    native: _C.ConvProblem,
    workspace_limit: int,
    open_search: Callable[[], _C.EngineSearch],
) -> _C.Plan | None:
    """The plan of what is known; None where it is no engine of cuDNN.

    Args:
        native: the problem.
        workspace_limit: bytes; -1: no limit.
        open_search: cuDNN's engines for the problem.

    Raises:
        UnfitError: what is known, but for a pin, does not build, or is not what the problem asks
            for: by the workspace and the notes that cuDNN itself tells here, by the errata, or as
            a matrix product of a problem that is none.
        CudnnError: what is pinned does not build.
    """
    text = known.text
    is_order = known.decision is None
    if text == ATEN.text:
        return None
    if text == MATMUL.text:
        if not is_order and not _C.is_matmul(native):
            raise UnfitError(NOT_ALLOWED, "the problem is no matrix product")
        return None
    try:
        search = open_search()
        here = search.describe(text)
        if not is_order and not _C.is_allowed(here, native, workspace_limit):
            raise UnfitError(NOT_ALLOWED, _told(here.workspace_bytes, here.numerical_notes))
        plan = search.build(text)
    except _C.CudnnError as failure:
        if is_order:
            raise
        raise UnfitError(NO_LONGER_BUILDS, str(failure)) from None
    if not is_order and 0 <= workspace_limit < plan.workspace_bytes:
        raise UnfitError(NOT_ALLOWED, _told(plan.workspace_bytes, here.numerical_notes))
    return plan


def _told(workspace_bytes: int, notes: list[str]) -> str:
    return f"here it needs {workspace_bytes} bytes of workspace; notes: {', '.join(notes) or '-'}"


def _search_on(native: _C.ConvProblem, device: int) -> Callable[[], _C.EngineSearch]:
    return lambda: _C.EngineSearch.on_device(native, device)


def _forced(text: str, plan: _C.Plan | None) -> Measurement:
    """What a pin names, as a candidate that nobody timed."""
    if plan is None:
        return Measurement(MATMUL if text == MATMUL.text else ATEN, None, 0)
    engine, knobs = parse_engine_text(text)
    return Measurement(Candidate(engine, knobs, plan.workspace_bytes, (), (), text, "", 0), None, 0)
