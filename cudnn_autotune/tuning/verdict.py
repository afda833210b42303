"""Whether a way of computing a problem is right: it is run, checked, and complained of."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.queried import Tensors
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.tuning.checking import relative_error, tolerance

_log = logging.getLogger(__name__)


def error_of(
    problem: ConvProblem, text: str, plan: _C.Plan | None, tensors: Tensors
) -> float | None:
    """As ``checking.relative_error``; infinity where it fails to run."""
    try:
        return relative_error(problem, _runner(problem, text, plan, tensors), *tensors)
    except _C.CudnnError as failure:
        # As text: who keeps log records would keep the tensors of the error's frames.
        _log.warning("%s: %s fails: %s", problem.text, text, str(failure))
        return math.inf


def is_right(problem: ConvProblem, text: str, error: float | None) -> bool:
    if error is None or error <= tolerance(problem):
        return True
    _log.warning("%s: %s is wrong (relative error %.3g)", problem.text, text, error)
    return False


def _runner(
    problem: ConvProblem, text: str, plan: _C.Plan | None, tensors: Tensors
) -> Callable[[], None]:
    """Computes the problem on ``tensors`` in the way that ``text`` names."""
    written = tensors["xwy".index({"fprop": "y", "dgrad": "x", "wgrad": "w"}[problem.op])]
    native = problem.native()
    if plan is not None:
        return lambda: _C.execute(plan, *tensors)
    if text == MATMUL.text:
        return lambda: _C.run_matmul(native, *tensors)

    def aten() -> None:
        written.copy_(_C.run_aten(native, *tensors))

    return aten
