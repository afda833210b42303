"""Builds the plans of implementations, after those of users have been run in another process."""

from __future__ import annotations

import logging

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.offers import described, gpu_of, recipe_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.recipe_plan import recipe_plan
from cudnn_autotune.tuning import isolated_run

_log = logging.getLogger(__name__)
_reported: set[str] = set()


def build(native: _C.ConvProblem, text: str, device: int) -> _C.Plan:
    """Builds the plan of an implementation's candidate (a ``_C.PlanBuilder``).

    Raises:
        ValueError: ``text`` does not parse.
        ImplementationError: the implementation is not registered, in this version, does not offer
            this for the problem, does harm (see ``isolated_run``), or does not build.
        PlanError: a part of it does not build.
    """
    problem, gpu = ConvProblem.from_native(native), gpu_of(device)
    described(text, problem, gpu)
    isolated_run.check(text, problem, device)
    try:
        return recipe_plan(problem, text, recipe_of(text, problem, gpu), device)
    except Exception as error:
        # A search leaves it out without a word, since engines that do not build are many. Without
        # NVRTC all kernels fail for one reason, which is logged once.
        known = {text, str(error)}
        if _reported.isdisjoint(known):
            _log.warning("%s does not build; first for %s: %s", text, problem.text, error)
        _reported.update(known)
        raise
