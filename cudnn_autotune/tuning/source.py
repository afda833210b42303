"""The interface of a source of choices for a miss, and the sources' common parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.tuning import choice_log, settings
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.serving import Served

BeginsTrial = Callable[..., "_C.OnlineTrial | None"]
_begins_trials: list[BeginsTrial] = []


def begin_trials_by(begin: BeginsTrial) -> None:
    """Sets the function that begins a trial in later calls: ``online.trials.begin``."""
    _begins_trials[:] = [begin]


def begin_trial(*args: Any, **keywords: Any) -> _C.OnlineTrial | None:
    """Begins a trial; arguments and result as of ``online.trials.begin``."""
    return _begins_trials[0](*args, **keywords)


@dataclass(frozen=True)
class Miss:
    """A call whose problem has no engine yet, with the arguments of ``miss.choose``."""

    problem: ConvProblem
    policy: Policy
    device: int
    tensors: Operands
    serving: _C.Plan | None = None

    @property
    def is_probe(self) -> bool:
        return self.policy.probe is not None

    @property
    def limits(self) -> Limits:
        return Limits(self.policy.benchmark, settings.get_budget_ms())

    @cached_property
    def earlier(self) -> Choice | None:
        """The provisional choice of this process, which has served so far."""
        made = choice_log.find(self.problem, self.policy, self.device)
        return made if made is not None and made.lacking else None


Source = Callable[[Miss], Served | None]
"""A function from a miss to the choice that serves it; None if the source has none."""
