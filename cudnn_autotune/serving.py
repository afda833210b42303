"""Serving a problem by what is known of it: built, and checked where nobody has checked it yet."""

from __future__ import annotations

import logging

from cudnn_autotune import store_settings, verdict
from cudnn_autotune._extension import _C
from cudnn_autotune.engines import ATEN, Candidate, parse_engine_text
from cudnn_autotune.outcome import Outcome
from cudnn_autotune.problem import ConvProblem
from cudnn_autotune.queried import Tensors
from cudnn_autotune.remembering import Known
from cudnn_autotune.sampling.selection import Timed
from cudnn_autotune.store import Decision
from cudnn_autotune.unlisted import MATMUL

_log = logging.getLogger(__name__)


def served_by(
    native: _C.ConvProblem,
    problem: ConvProblem,
    known: Known,
    device: int,
    tensors: Tensors,
) -> Outcome | None:
    """What is known, built and checked where nobody has; None where it must be tuned after all."""
    decision = known.decision
    plan = None
    if known.text not in (ATEN.text, MATMUL.text):
        try:
            plan = _C.EngineSearch.on_device(native, device).build(known.text)
        except _C.CudnnError as failure:
            if decision is None:
                raise  # a pin is an order
            _log.warning("%s: %s no longer builds: tuned again", problem.text, known.text)
            _log.debug("%s", str(failure))
            _strike(decision, device)
            return None
    error = None if decision is None else decision.relative_error
    if error is None:
        error = verdict.error_of(problem, known.text, plan, tensors)
        is_right = verdict.is_right(problem, known.text, error)
        if not is_right and decision is not None:
            _strike(decision, device)
            return None
        if not is_right:
            _log.warning("%s: %s serves all the same: it is pinned", problem.text, known.text)
    if decision is None:
        return Outcome(None, _forced(known.text, plan), plan, error)
    return Outcome(decision.selection, decision.selection.winner, plan, error, decision.struck)


def _strike(decision: Decision, device: int) -> None:
    """A store may prefer what it has to what will be tuned instead, and answer alike for ever."""
    if store_settings.is_read() or store_settings.is_written():
        store_settings.layers(device).strike(decision)


def _forced(text: str, plan: _C.Plan | None) -> Timed:
    """What a pin names, as a candidate that nobody timed."""
    if plan is None:
        return Timed(MATMUL if text == MATMUL.text else ATEN, None, 0)
    engine, knobs = parse_engine_text(text)
    return Timed(Candidate(engine, knobs, plan.workspace_bytes, (), (), text, "", 0), None, 0)
