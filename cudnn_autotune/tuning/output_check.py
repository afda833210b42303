"""Runs candidates on a caller's tensors, and rejects those whose output is wrong.

What they write goes to memory between guard bands instead, and is compared there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.guard_bands import GuardedMemory, are_touched
from cudnn_autotune.engines import registry
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
from cudnn_autotune.timers.measuring import WRITTEN
from cudnn_autotune.tuning.checking import comparison, error_in, tolerance

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class OutputChecks:
    """The checks of one problem's candidates so far."""

    errors: dict[str, float | None] = field(default_factory=dict)
    """Relative error of each checked candidate by its text, as ``checking.relative_error``."""
    rejected: list[tuple[str, float]] = field(default_factory=list)
    """``(engine text, relative error)`` of the candidates whose output is wrong."""

    def is_right(self, problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> bool:
        """Runs the candidate named ``text`` and compares its output with the reference."""
        try:
            verdict = begin(problem, text, plan, tensors)
        except torch.OutOfMemoryError:
            verdict = Verdict(None)
        return self.conclude(problem, text, verdict)

    def conclude(self, problem: ConvProblem, text: str, verdict: Verdict) -> bool:
        """Records a verdict, and returns whether the output is right. Waits for the verdict."""
        error = self.errors[text] = verdict.error()
        if error is None or error <= tolerance(problem):
            return True
        _log.warning("%s: %s %s", problem.text, text, verdict.fault())
        self.rejected.append((text, error))
        return False


class Verdict:
    """The error of a candidate's output, which the device may still be computing.

    Args:
        found: what ``checking.comparison`` returns, and behind it whether guard bands were written
            to; or the error.
        failure: why the candidate failed to run.
    """

    def __init__(self, found: Tensor | float | None, failure: str = "") -> None:
        self._found = found
        self._failure = failure
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
        bands were written to."""
        if self._event is not None:
            self._event.synchronize()
        if not isinstance(self._found, Tensor):
            return self._found
        compared, is_outside = self._values()
        return math.inf if is_outside else error_in(compared)

    def fault(self) -> str:
        """What is wrong, as the rest of a sentence about the candidate. Waits for the device."""
        error = self.error()
        if self._failure:
            return f"fails: {self._failure}"
        if isinstance(self._found, Tensor) and self._values()[1]:
            return "writes outside of its result or its workspace"
        return f"is wrong (relative error {math.nan if error is None else error:.3g})"

    def _values(self) -> tuple[list[float], bool]:
        assert isinstance(self._found, Tensor)
        *compared, is_outside = self._found.tolist()
        return compared, bool(is_outside)


def begin(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> Verdict:
    """Enqueues the candidate named ``text`` and the comparison of its output. The error of one that
    fails to run is infinite.

    Without memory for guard bands, an engine or PyTorch's own path writes to the caller's result.

    Raises:
        OutOfMemoryError: there is none for the guard bands of an implementation.
    """
    try:
        return _begun(problem, text, plan, tensors)
    except _C.PlanError as failure:
        # As text, since a handler that keeps log records would keep the tensors of its frames.
        _log.warning("%s: %s fails: %s", problem.text, text, str(failure))
        return Verdict(math.inf, str(failure))


def _begun(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> Verdict:
    place = WRITTEN[problem.op]
    try:
        result = GuardedMemory.like(tensors[place])
        workspace = GuardedMemory(plan.workspace_bytes, tensors[place].device)
    except torch.OutOfMemoryError:
        if registry.is_text(text):
            raise
        found = comparison(problem, partial(_run, problem, plan, tensors), *tensors)
        return Verdict(None if found is None else torch.cat([found, found.new_zeros(1)]))
    written = result.as_tensor(tensors[place])
    guarded = (*tensors[:place], written, *tensors[place + 1 :])
    run = partial(_run, problem, plan, guarded, workspace.memory)
    found = comparison(problem, run, *guarded)
    if found is None:
        return Verdict(None)
    return Verdict(torch.cat([found, are_touched(result, workspace).to(found.dtype)[None]]))


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
        if not registry.is_text(text):
            return ""
        verdict = begin(problem, text, plan, tensors)
        error = verdict.error()
        return "" if error is None or error <= tolerance(problem) else f"it {verdict.fault()}"

    return why
