"""Plans of any text, which need no GPU."""

from __future__ import annotations

from collections.abc import Callable

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C

PROBLEM = ca.ConvProblem("fprop", (1, 8, 8, 8), (8, 8, 3, 3), padding=1)


def _not_run(*tensors: object) -> None:
    raise AssertionError("this plan is not to run")


def plan_of(
    text: str,
    problem: ca.ConvProblem = PROBLEM,
    run: Callable[..., None] = _not_run,
    workspace_bytes: int = 0,
) -> _C.Plan:
    """A plan that calls ``run`` with the problem's tensors and a workspace."""
    return _C.recipe_plan(problem.native(), text, [("python", run)], workspace_bytes, 0)
