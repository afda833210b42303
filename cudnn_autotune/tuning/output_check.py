"""Runs candidates on a caller's tensors, and rejects those whose output is wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.tuning.checking import relative_error, tolerance

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class OutputChecks:
    """The checks of one problem's candidates so far."""

    errors: dict[str, float | None] = field(default_factory=dict)
    """Relative error of each checked candidate by its text, as ``checking.relative_error``."""
    rejected: list[tuple[str, float]] = field(default_factory=list)
    """``(engine text, relative error)`` of the candidates whose output is wrong."""

    def is_right(
        self, problem: ConvProblem, text: str, plan: _C.Plan | None, tensors: Tensors
    ) -> bool:
        """Runs the candidate named ``text`` and compares its output with the reference."""
        error = self.errors[text] = error_of(problem, text, plan, tensors)
        if error is None or error <= tolerance(problem):
            return True
        _log.warning("%s: %s is wrong (relative error %.3g)", problem.text, text, error)
        self.rejected.append((text, error))
        return False


def error_of(
    problem: ConvProblem, text: str, plan: _C.Plan | None, tensors: Tensors
) -> float | None:
    """As ``checking.relative_error``; infinity where the candidate fails to run."""
    try:
        return relative_error(problem, _runner(problem, text, plan, tensors), *tensors)
    except _C.CudnnError as failure:
        # As text, since a handler that keeps log records would keep the tensors of its frames.
        _log.warning("%s: %s fails: %s", problem.text, text, str(failure))
        return math.inf


def _runner(
    problem: ConvProblem, text: str, plan: _C.Plan | None, tensors: Tensors
) -> Callable[[], None]:
    """A function that computes the problem on ``tensors`` by the candidate named ``text``."""
    written = tensors["xwy".index({"fprop": "y", "dgrad": "x", "wgrad": "w"}[problem.op])]
    native = problem.native()
    if plan is not None:
        return lambda: _C.execute(plan, *tensors)
    if text == MATMUL.text:
        return lambda: _C.run_matmul(native, *tensors)

    def aten() -> None:
        written.copy_(_C.run_aten(native, *tensors))

    return aten
