"""``tune``: all convolutions of a model, ahead of its first step."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.nn.model_problems import NOTHING_SERVED, find
from cudnn_autotune.nn.modules import check_model
from cudnn_autotune.nn.untouched import generators_kept
from cudnn_autotune.sampling.auto import Auto
from cudnn_autotune.sampling.online import Online
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import events, settings, tune_problem
from cudnn_autotune.tuning.model_tuning import Progress, tune_together

_log = logging.getLogger(__name__)


def tune(
    model: nn.Module,
    *inputs: Any,
    train: bool = True,
    budget_s: float | None = None,
    **kwargs: Any,
) -> list[Decision]:
    """Tunes what ``model(*inputs, **kwargs)`` needs, so that its first step does not wait.

    The model runs once, with cuDNN's heuristics, which shows its problems and how often a step
    calls each; afterwards all is as it was (see ``distributed.problems_of``). Then all problems are
    raced together: the next round goes where the step can still gain most, and the race ends when
    the step's convolutions are expected to be no more than 0.2 % slower than with the fastest
    candidates. Plans are compiled on all cores meanwhile. Each decision is stored and in force as
    soon as it is made. What an earlier call of this function has decided is not raced again, unless
    its race was cut short by the budget or an interruption.

    This holds for the default mode, ``auto``. If another mode is in force, each problem is tuned in
    that mode, one after the other. A layer whose ``sampling=`` differs from the mode in force still
    tunes at its first call. In a terminal a progress bar shows what is left.

    Args:
        model: on one CUDA device, with layers of this package, or under ``enable()``.
        inputs, kwargs: as for a call of the model.
        train: whether the backward is tuned, too; the state of the model's modules stays as it is.
        budget_s: seconds of wall time after which no further round of a race begins; None: no
            limit. What has begun then, be it the compiling of plans, is finished, and what was
            raced is checked and stored, unless an earlier decision has more timed launches.
            Problems without a decision that were not timed are served by the heuristics' first plan
            in this process, and are not stored. 0: nothing is timed.

    Returns:
        The decisions, in the order in which a step calls their problems. Without a CUDA device, or
        with a CPU-only torch, nothing is done: the list is empty, and the log says so once.

    Raises:
        TypeError: ``model`` is no module, ``budget_s`` no number, or ``train`` no bool.
        ValueError: ``budget_s`` is negative or not finite, or is given for another mode than
            ``auto``; the mode in force decides in later calls
            (``online``); the model has no convolution that this package serves, is on several
            devices, or has lazy parameters.
        KeyboardInterrupt: what was raced until then is decided and stored, as with a budget that is
            spent.
        Exception: whatever the model raises.
    """
    check_model(model)
    if not isinstance(train, bool):
        raise TypeError(f"train must be a bool, got {type(train).__name__}")
    mode = settings.get_sampling()
    check_budget(budget_s, mode)
    if isinstance(sampling.get(mode), Online):
        raise ValueError(
            f"sampling must be a mode that decides at once, and {mode!r} decides in later calls; "
            "set another for this call: with cudnn_autotune.flags('auto')"
        )
    if not can_tune():
        return []
    with torch.enable_grad() if train else torch.no_grad():
        found = find(model, inputs, kwargs)
    if found.device is None:
        raise ValueError(NOTHING_SERVED)
    with _bar() as report, events.SEARCHES.shown_elsewhere():
        return tune_problems(found.counts, found.device, mode, budget_s, report)


def can_tune() -> bool:
    """Whether there is a CUDA device, and a build that can tune on it; the log says once why not.

    A program that tunes its models runs everywhere, as ``enable()`` and ``prefetch()`` do.
    """
    if extension_available() and torch.cuda.is_available():
        return True
    _say_that_nothing_is_tuned()
    return False


@cache
def _say_that_nothing_is_tuned() -> None:
    why = "there is no CUDA device here" if extension_available() else "this torch has no CUDA"
    _log.warning("tune() does nothing: %s", why)


def _bar() -> AbstractContextManager[Callable[[Progress], None]]:
    """The progress bar in a terminal, else nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext(lambda progress: None)
    from rich.console import Console  # most programs need neither

    from cudnn_autotune.tuning import progress_bar

    return progress_bar.shown(Console(stderr=True))


def check_budget(budget_s: object, mode: str) -> None:
    """Raises TypeError or ValueError unless it is None or a number of seconds of 0 or more, and
    None if ``mode`` tunes one problem after the other."""
    if budget_s is None:
        return
    if not isinstance(sampling.get(mode), Auto):
        raise ValueError(
            f"budget_s must be None in mode {mode!r}: set_budget_ms() bounds each of its choices"
        )
    if not isinstance(budget_s, (int, float)) or isinstance(budget_s, bool):
        raise TypeError(f"budget_s must be a number of seconds or None, got {budget_s!r}")
    if not 0 <= budget_s < math.inf:
        raise ValueError(
            f"budget_s must be a finite number of seconds of 0 or more, got {budget_s}"
        )


def tune_problems(
    calls: Mapping[ConvProblem, int],
    device: int,
    mode: str,
    budget_s: float | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    *,
    anew: bool = False,
) -> list[Decision]:
    """Tunes problems on a CUDA device, in one race if ``mode`` is ``auto``; see :func:`tune`."""
    with torch.cuda.device(device), generators_kept([device]):
        if isinstance(sampling.get(mode), Auto):
            # It needs the compiled extension, without which this module is imported, too.
            from cudnn_autotune.tuning.gpu_searches import GpuSearches

            with GpuSearches(device, mode, anew) as searches:
                return tune_together(calls, searches, budget_s, report)
        made: list[Decision] = []
        for problem in calls:
            report(Progress(len(made), len(calls), None))
            made.append(tune_problem.tune(problem, device, mode, anew=anew))
        return made
