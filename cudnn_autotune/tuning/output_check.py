"""Runs candidates on a caller's tensors, and rejects those whose output is wrong."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
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
        return self.conclude(problem, text, begin(problem, text, plan, tensors))

    def conclude(self, problem: ConvProblem, text: str, verdict: Verdict) -> bool:
        """Records a verdict, and returns whether the output is right. Waits for the verdict."""
        error = self.errors[text] = verdict.error()
        if error is None or error <= tolerance(problem):
            return True
        _log.warning("%s: %s is wrong (relative error %.3g)", problem.text, text, error)
        self.rejected.append((text, error))
        return False


class Verdict:
    """The error of a candidate's output, which the device may still be computing.

    Args:
        found: what ``checking.comparison`` returns, or the error.
    """

    def __init__(self, found: Tensor | float | None) -> None:
        self._found = found
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
        """Waits for the device; returns as ``checking.relative_error``."""
        if self._event is not None:
            self._event.synchronize()
        found = self._found
        return error_in(found.tolist()) if isinstance(found, Tensor) else found


def begin(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Tensors) -> Verdict:
    """Enqueues the candidate named ``text`` and the comparison of its output. The error of one that
    fails to run is infinite."""
    written = tensors["xwy".index({"fprop": "y", "dgrad": "x", "wgrad": "w"}[problem.op])]

    def run() -> None:
        written.copy_(_C.execute(plan, *tensors))  # PyTorch's own path allocates its result

    try:
        return Verdict(comparison(problem, run, *tensors))
    except _C.PlanError as failure:
        # As text, since a handler that keeps log records would keep the tensors of its frames.
        _log.warning("%s: %s fails: %s", problem.text, text, str(failure))
        return Verdict(math.inf)
