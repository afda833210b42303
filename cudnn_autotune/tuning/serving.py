"""Service of a problem by a known choice, which this process builds and checks first.

A decision of a store, of another rank or of an application was measured elsewhere, perhaps by an
older version, and files can be edited. So this machine verifies what it can. A problem whose
decision fails is tuned again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.json_node import LARGEST_NUMBER
from cudnn_autotune.engines import offers
from cudnn_autotune.engines.candidate_id import identify
from cudnn_autotune.engines.candidates import is_one_plan_in_pytorch
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.engines.registry import calls_python
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import admits
from cudnn_autotune.timers.lacking import Lacking, is_passing
from cudnn_autotune.tuning import made_ahead, remembering
from cudnn_autotune.tuning.checking import OutputChecks
from cudnn_autotune.tuning.choice import Choice, for_want_of

_log = logging.getLogger(__name__)

_MOST_SHOWN = 1000  # characters of a text in the log

# Reasons of fallbacks().
_AGAIN = "tuned again"
NO_LONGER_BUILDS = f"a remembered choice no longer builds: {_AGAIN}"
NOT_ALLOWED = f"a remembered choice is not allowed here: {_AGAIN}"
WRONG = f"a remembered choice is wrong: {_AGAIN}"
FAILS = f"a remembered choice fails to run: {_AGAIN}"
VARIES = f"a remembered choice differs from run to run: {_AGAIN}"


class UnfitError(Exception):
    """The error of a known choice that must not serve; ``args`` are the reason for ``fallbacks()``
    and the details."""

    is_passing = False
    """Whether it failed for a reason that may pass, and may serve later."""
    is_varying = False
    """Whether it may serve problems that need no determinism."""


@dataclass(frozen=True)
class Served:
    """A choice that is ready to run."""

    choice: Choice
    plan: _C.Plan
    is_found: bool = True
    """False if a search found no right candidate, and PyTorch's own path serves."""
    has_unfit: bool = False
    """Whether better candidates of its search are wrong, or fail."""
    is_earlier: bool = False
    """Whether it is the earlier provisional choice."""
    begin_trial: Callable[[Served, int], _C.OnlineTrial | None] | None = None
    """The function that begins a trial in later calls, given this and the problem's
    ``choice_log.generation``; None: this is the choice."""


def own_path(problem: ConvProblem, device: int) -> _C.Plan:
    """Returns the plan of PyTorch's own path."""
    return _C.build_plan(problem.native(), OWN_PATH.text, device)


def serve(known: Choice, tensors: Operands, plan: _C.Plan | None = None) -> Served | None:
    """Builds a known choice, and checks its output on ``tensors``, unless a process of this user
    has found it right (``store.checked_outputs``). It is provisional if the output cannot be
    compared.

    If neither ``tensors`` nor random ones (because memory is short) allow a comparison, the choice
    serves, and its relative error is None.

    A pinned engine serves even if its output is wrong, with a warning. A neighbour's engine that
    cannot serve is not counted, since this problem had no decision.

    Args:
        plan: The provisional plan, which is not built again if it is the choice's.

    Returns:
        The choice, ready to run; None if the problem must be tuned after all, or left to PyTorch
        with a locked store, which is logged and counted in ``fallbacks()``.

    Raises:
        PlanError: A pinned candidate does not build.
    """
    problem, text = known.problem, known.text
    remembering.read_ahead(known)
    try:
        if plan is None or plan.text != text:
            plan = built(known, _search_on(problem.native(), known.device))
        error = _checked(known, plan, tensors)
    except UnfitError as unfit:
        reason, details = unfit.args
        if known.origin == "neighbour":
            _log.info("%s: %s of a neighbour does not serve: %s", problem.text, text, details)
            return None
        if store_settings.is_locked():
            reason = reason.replace(_AGAIN, "left to PyTorch")
        _C.count_fallback(reason)
        named, why = _printable(text), _printable(details)
        _log.warning("%s: %s (%s): %s (%s)", problem.text, named, known.origin, reason, why)
        if not unfit.is_passing:
            remembering.reject(known, varies=unfit.is_varying)
        return None
    selection = known.decision.selection
    if known.origin in ("pinned", "neighbour"):
        candidate = replace(selection.winner.candidate, workspace_bytes=plan.workspace_bytes)
        selection = replace(selection, ranking=(Measurement(candidate, None, 0),))
    # A decision holds finite numbers only.
    error = None if error is None else min(error, LARGEST_NUMBER)
    decision = replace(known.decision, selection=selection, relative_error=error)
    # Ranks agree on provisional choices as well, and pins are not looked at again.
    served = replace(known, decision=decision)
    if known.origin != "pinned" and error is None:
        served = for_want_of(served, Lacking(check=True))
    return Served(served, plan)


def _checked(known: Choice, plan: _C.Plan, tensors: Operands) -> float | None:
    """Returns the relative error of the output; None if it cannot be compared. Raises UnfitError if
    it is wrong or missing, unless the choice is pinned."""
    problem, text, checks = known.problem, known.text, OutputChecks()
    with _verifying(known):
        # Checks of new sizes are not kept.
        if known.origin != "neighbour" and (error := remembering.checked_error(known)) is not None:
            return error
        is_fine = checks.is_right(problem, text, plan, tensors)
    error, failure = checks.errors.get(text), checks.failures.get(text)
    if is_fine:
        return error
    if known.origin == "pinned":
        _log.warning("%s: %s serves all the same: it is pinned", problem.text, text)
        return error
    if failure is not None:
        unfit = UnfitError(FAILS, failure)
        unfit.is_passing = is_passing(failure)
    elif text in checks.varying:
        unfit = UnfitError(VARIES, "determinism is asked for")
        unfit.is_varying = True
    else:
        unfit = UnfitError(WRONG, f"its relative error is {error:.3g}")
    raise unfit


@contextmanager
def _verifying(known: Choice) -> Iterator[None]:
    """Turns any error within the context into an UnfitError, unless the choice is pinned. A known
    choice may have any texts and numbers, and a call is served in any case."""
    try:
        yield
    except UnfitError:
        raise
    except Exception as failure:
        if known.origin == "pinned":
            raise
        unfit = UnfitError(NO_LONGER_BUILDS, str(failure) or type(failure).__name__)
        # The following search fails on a lost GPU, too.
        is_lost = isinstance(failure, torch.AcceleratorError)
        unfit.is_passing = is_lost or is_passing(str(failure))
        # A handler that keeps log records would keep an error's frames, and their tensors.
        raise unfit from None


def _printable(text: str) -> str:
    """Returns the beginning of a text of unknown origin, for the log."""
    return text[:_MOST_SHOWN].encode("utf-8", "backslashreplace").decode()


def during_capture(
    native: _C.ConvProblem,
    sampling: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
) -> _C.Plan:
    """Returns the plan of a problem during a stream's capture, when outputs cannot be checked. C++
    calls it with the key of the choice (``Policy.of_call``).

    Without a known choice PyTorch's candidate serves the capture, unchecked too, or with a locked
    store PyTorch's own path. The next call outside a capture is served by :func:`serve`, which
    checks the output.
    """
    problem = ConvProblem.from_native(native)
    policy = Policy.of_call(sampling, workspace_limit, benchmark_limit)
    known = known_during_capture(problem, policy, device)
    if known is not None:
        return known
    if store_settings.is_locked():
        return own_path(problem, device)
    return heuristic_plan(problem, workspace_limit, device, _search_on(native, device))


def heuristic_plan(
    problem: ConvProblem,
    workspace_limit: int,
    device: int,
    open_search: Callable[[], _C.EngineList],
) -> _C.Plan:
    """Returns the first config of cuDNN's heuristics that builds and that PyTorch would run, or
    PyTorch's own path. That also serves where PyTorch runs further kernels: with an epilogue or
    uneven padding some engines are wrong (csrc/core/cudnn/errata.cpp).

    Args:
        workspace_limit: bytes; -1: no limit.
        open_search: Opens cuDNN's engines for the problem.
    """
    native = problem.native()
    if is_one_plan_in_pytorch(problem):
        with suppress(_C.CudnnError):  # cuDNN cannot express the problem
            search = open_search()
            for candidate in (c for mode in ("A", "FALLBACK") for c in search.query(mode)):
                is_pytorchs = (identify(candidate.text).kind == "unfused") == problem.bias
                if is_pytorchs and _C.is_allowed(candidate, native, workspace_limit):
                    with suppress(_C.CudnnError):
                        return search.build(candidate.text)
    return own_path(problem, device)


def known_during_capture(problem: ConvProblem, policy: Policy, device: int) -> _C.Plan | None:
    """Returns the plan of a pin, or of a known choice whose output a process of this user has found
    right (``store.checked_outputs``) and that :func:`built` admits. Returns None without one.

    A choice that may call Python is left out unless it is pinned: its preparation at a first run
    may break the capture, and a user's implementation may be run in another process first.
    """
    known = remembering.find(problem, policy, device)
    if known is None:
        return None
    is_pinned = known.origin == "pinned"
    if not is_pinned and (remembering.checked_error(known) is None or calls_python(known.text)):
        return None
    try:
        plan = built(known, _search_on(problem.native(), device))
    except (UnfitError, _C.PlanError) as failure:
        named, why = _printable(known.text), _printable(failure.args[-1])
        _log.warning("%s: %s is not captured: %s", problem.text, named, why)
        return None
    if not is_pinned:
        _log.info("%s: %s is captured as remembered", problem.text, known.text)
    return plan


def built(known: Choice, open_search: Callable[[], _C.EngineList]) -> _C.Plan:
    """Returns the plan of a known choice.

    Args:
        open_search: Opens cuDNN's engines for the problem.

    Raises:
        UnfitError: A choice that is not pinned does not build, or :func:`may_serve` refuses it.
        PlanError: A pinned candidate does not build.
    """
    problem, text, device = known.problem, known.text, known.device
    is_pinned = known.origin == "pinned"
    with _verifying(known):
        is_engine = identify(text).is_engine
        search = open_search() if is_engine else None
        if search is not None and is_pinned:
            search.describe(text)  # its error says more about a text than a build's error
        notes = () if is_pinned else may_serve(text, problem, device, known.workspace_limit, search)
        plan = made_ahead.taken(problem, text, device)
        if plan is None and search is not None:
            plan = search.build(text)
        elif plan is None:
            plan = _C.build_plan(problem.native(), text, device)
        if not is_pinned and not admits(known.workspace_limit, plan.workspace_bytes):
            raise UnfitError(NOT_ALLOWED, _needs(plan.workspace_bytes, notes))
    return plan


def may_serve(
    text: str,
    problem: ConvProblem,
    device: int,
    workspace_limit: int | None,
    search: _C.EngineList | None,
) -> Sequence[str]:
    """Returns the numerical notes of a candidate that may serve a problem, as known before its
    build. The text decides: all else in a record may be wrong.

    Args:
        search: cuDNN's engines for the problem, if the candidate is one.

    Raises:
        UnfitError: The problem forbids it: by its workspace, by the notes that cuDNN or its
            implementation reports here, or by the errata.
        CudnnError, ImplementationError, ValueError: It is not there.
    """
    if search is not None:
        here, limit = search.describe(text), -1 if workspace_limit is None else workspace_limit
        if not _C.is_allowed(here, problem.native(), limit):
            raise UnfitError(NOT_ALLOWED, _needs(here.workspace_bytes, here.numerical_notes))
        return here.numerical_notes
    if identify(text).is_implementation:
        offer = offers.described(text, problem, offers.gpu_of(device))
        if not offers.is_allowed(offer, problem, workspace_limit):
            raise UnfitError(NOT_ALLOWED, _needs(offer.workspace_bytes, offer.numerical_notes))
        return offer.numerical_notes
    return ()


def _needs(workspace_bytes: int, notes: Sequence[str]) -> str:
    return f"here it needs {workspace_bytes} bytes of workspace; notes: {', '.join(notes) or '-'}"


def _search_on(native: _C.ConvProblem, device: int) -> Callable[[], _C.EngineList]:
    return lambda: _C.EngineList.on_device(native, device)
