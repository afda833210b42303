"""Runs candidates on a caller's tensors, and rejects those whose output is wrong.

What they write goes to memory between guard bands instead, and is compared there. Where the
caller's tensors do not tell right from wrong, as zeros do not, random ones do. An output is right,
wrong, or not comparable, which is not recorded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.guard_bands import GuardedMemory, are_touched
from cudnn_autotune.engines.candidate_id import identify
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
from cudnn_autotune.timers.measuring import WRITTEN, telling_operands
from cudnn_autotune.tuning.checking import comparison, error_in, is_right, new_seed

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class OutputChecks:
    """The checks of one problem's candidates so far."""

    errors: dict[str, float | None] = field(default_factory=dict)
    """Relative error of each checked candidate by its text, as ``checking.relative_error``; None if
    its output is neither right nor wrong, because it could not be compared."""
    rejected: list[tuple[str, float]] = field(default_factory=list)
    """``(engine text, relative error)`` of the candidates whose output is wrong."""

    def is_right(self, problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> bool:
        """Runs the candidate named ``text`` and compares its output with the reference; returns
        False if it is wrong. If it is not comparable, ``errors`` say so."""
        return self.conclude(problem, text, examined(problem, text, plan, tensors))

    def conclude(self, problem: ConvProblem, text: str, verdict: Verdict) -> bool:
        """Records a verdict, and returns False if the output is wrong. Waits for the verdict."""
        error = self.errors[text] = verdict.error()
        if error is None or is_right(problem, error):
            return True
        _log.warning("%s: %s %s", problem.text, text, verdict.fault())
        self.rejected.append((text, error))
        return False


@dataclass(frozen=True)
class Compared:
    """The circumstances of one comparison with a reference."""

    problem: ConvProblem
    seed: int
    """The seed of the places that were compared."""
    is_random: bool = False
    """Whether the operands were random, and not the caller's."""
    is_guarded: bool = True
    """Whether it would have been seen if the candidate had written to other memory than its own."""


class Verdict:
    """The error of a candidate's output, which the device may still be computing.

    Args:
        found: what ``checking.comparison`` returns, and behind it whether guard bands were written
            to; or the error.
        failure: why the candidate failed to run.
        compared: what was compared; None if nothing was.
    """

    def __init__(
        self, found: Tensor | float | None, failure: str = "", compared: Compared | None = None
    ) -> None:
        self._found = found
        self._failure = failure
        self._compared = compared
        self._event: torch.cuda.Event | None = None
        if isinstance(found, Tensor) and found.is_cuda:
            # The copy lies in pinned memory, so the host does not wait for it.
            self._found = found.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(found.device))

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def error(self) -> float | None:
        """Waits for the device; returns as ``checking.relative_error``, and infinity where guard
        bands were written to. None as well where there was no memory for them, unless the output is
        wrong."""
        if self._event is not None:
            self._event.synchronize()
        if not isinstance(self._found, Tensor) or self._compared is None:
            return self._found if isinstance(self._found, float) else None
        if self._is_outside():
            return math.inf
        problem = self._compared.problem
        error = error_in(problem, self._found[:-1])
        is_guarded = self._compared.is_guarded or not is_right(problem, error)
        return error if is_guarded else None

    @property
    def needs_others(self) -> bool:
        """Whether other operands may tell what these did not. Waits for the device."""
        compared = self._compared
        is_telling = compared is None or compared.is_random or not compared.is_guarded
        return not is_telling and self.error() is None

    @property
    def is_compared(self) -> bool:
        """Whether there was memory to run and compare the candidate."""
        return self._found is not None

    def fault(self) -> str:
        """Returns the fault, as the rest of a sentence about the candidate; waits for it."""
        error = self.error()
        if self._failure:
            return f"fails: {self._failure}"
        if self._is_outside():
            return "writes outside of its result or its workspace"
        size = f"relative error {math.nan if error is None else error:.3g}"
        if self._compared is None:
            return f"is wrong ({size})"
        operands = "random operands, " if self._compared.is_random else ""
        return f"is wrong ({size}; {operands}seed {self._compared.seed})"

    def _is_outside(self) -> bool:
        return isinstance(self._found, Tensor) and bool(self._found[-1])


def examined(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> Verdict:
    """Runs the candidate named ``text`` and compares its output on the caller's tensors, or on
    random ones if those do not tell whether it is right. Waits for the device."""
    try:
        verdict = begin(problem, text, plan, tensors)
        return begin_anew(problem, text, plan, tensors) if verdict.needs_others else verdict
    except torch.OutOfMemoryError:
        return Verdict(None)


def begin(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> Verdict:
    """Enqueues the candidate named ``text`` and the comparison of its output. The error of one that
    fails to run is infinite.

    Without memory for guard bands, an engine or PyTorch's own path writes to the caller's result.

    Raises:
        OutOfMemoryError: there is none for the guard bands of an implementation.
    """
    return _begun(problem, text, plan, tensors, is_random=False)


def begin_anew(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> Verdict:
    """Does the same as :func:`begin`, on random operands instead of the caller's.

    Raises:
        OutOfMemoryError: there is no memory for them.
    """
    data = telling_operands(problem, tensors[0].device)
    return _begun(problem, text, plan, data, is_random=True)


def _begun(
    problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors, is_random: bool
) -> Verdict:
    compared = Compared(problem, new_seed(), is_random)
    try:
        return _compared(text, plan, tensors, compared)
    except _C.PlanError as failure:
        # A handler that keeps log records would keep an error's frames, and their tensors.
        _log.warning("%s: %s fails: %s", problem.text, text, str(failure))
        return Verdict(math.inf, str(failure))


def _compared(text: str, plan: _C.Plan, tensors: Tensors, compared: Compared) -> Verdict:
    problem, seed = compared.problem, compared.seed
    place = WRITTEN[problem.op]
    try:
        result = GuardedMemory.like(tensors[place])
        workspace = GuardedMemory(plan.workspace_bytes, tensors[place].device)
    except torch.OutOfMemoryError:
        if identify(text).is_implementation:
            raise
        # PyTorch's own path writes nothing but what it allocates.
        compared = replace(compared, is_guarded=not identify(text).is_engine)
        found = comparison(problem, partial(_run, problem, plan, tensors), *tensors, seed=seed)
        whole = None if found is None else torch.cat([found, found.new_zeros(1)])
        return Verdict(whole, compared=compared)
    written = result.as_tensor(tensors[place])
    guarded = (*tensors[:place], written, *tensors[place + 1 :])
    run = partial(_run, problem, plan, guarded, workspace.memory)
    found = comparison(problem, run, *guarded, seed=seed)
    if found is None:
        return Verdict(None)
    touched = are_touched(result, workspace).to(found.dtype)[None]
    return Verdict(torch.cat([found, touched]), compared=compared)


def _run(
    problem: ConvProblem, plan: _C.Plan, tensors: Tensors, workspace: Tensor | None = None
) -> None:
    # PyTorch's own path allocates its result.
    tensors[WRITTEN[problem.op]].copy_(_C.execute(plan, *tensors, workspace=workspace))


def refusal(problem: ConvProblem, tensors: Tensors) -> Callable[[str, _C.Plan], str]:
    """Returns a function of a candidate's text and plan, which says why the candidate must not run
    on the caller's tensors, and nothing if it may. Only an implementation's is run to find out,
    which raises OutOfMemoryError where there is no memory for that."""

    def why(text: str, plan: _C.Plan) -> str:
        if not identify(text).is_implementation:
            return ""
        verdict = examined(problem, text, plan, tensors)
        if not verdict.is_compared:
            raise torch.OutOfMemoryError("there is no memory to check it")
        error = verdict.error()
        return "" if error is None or is_right(problem, error) else f"it {verdict.fault()}"

    return why
