"""The begin of a trial, in which later calls decide about the choice that serves the first one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.online.preparation import LazyPreparation, OnlinePreparation
from cudnn_autotune.online.tuner import TUNER, OnlineCommitter, Prepared, Trial
from cudnn_autotune.sampling.strategy import Shortlister
from cudnn_autotune.tuning.serving import Served


def begin(
    first: Served,
    since: int,
    shortlist: Shortlister,
    nearby: Sequence[Candidate] = (),
    budget_ms: float | None = None,
    first_step: int | None = None,
) -> _C.OnlineTrial | None:
    """Begins a trial, whose first candidate serves until the decision.

    Args:
        since: the problem's ``choice_log.generation`` when the choice was begun.
        shortlist, nearby, budget_ms: as of :class:`OnlinePreparation`.
        first_step: the number of the call in which the candidates are prepared; None: the next one
            after the tuner's thread has started.

    Returns:
        The trial; None if the system gives no thread for it.
    """
    step = LazyPreparation()
    trial = _C.OnlineTrial(first.plan, step, first_step or 2)
    # It must hold neither the trial, which holds it, nor the call's tensors.
    begun_with = (trial.schedule, first, since, shortlist, nearby, budget_ms)
    step.begin = partial(_preparation, *begun_with)
    return trial if first_step is not None or step.start() else None


def _preparation(
    schedule: _C.TurnSchedule,
    first: Served,
    since: int,
    shortlist: Shortlister,
    nearby: Sequence[Candidate],
    budget_ms: float | None,
) -> OnlinePreparation:
    """Begins a trial on the tuner's thread, and returns its preparation step for the calls."""
    choice, prepared = first.choice, Prepared()
    assert choice.chosen is not None
    candidate, committer = choice.chosen.candidate, OnlineCommitter(choice, prepared, since)
    earlier = committer.earlier()
    TUNER.add(Trial(schedule, candidate, committer, prepared, earlier))
    return OnlinePreparation(
        choice, candidate, first.plan, prepared, shortlist, nearby, budget_ms, earlier
    )
