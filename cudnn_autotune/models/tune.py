"""``tune``: all convolutions of a model, ahead of its first step."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from cudnn_autotune import sampling
from cudnn_autotune.compile.communication import is_among_ranks
from cudnn_autotune.core.display import bar_console, html_table
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.models import memory_format as layouts
from cudnn_autotune.models.problems import NOTHING_SERVED, Found, find
from cudnn_autotune.models.tuning import Progress, progress_bar, tune_together
from cudnn_autotune.nn.modules import check_inputs, check_model
from cudnn_autotune.nn.untouched import check_initialized, run_once
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import events, gain, settings, tune_problem
from cudnn_autotune.tuning.choice_log import choices

_log = logging.getLogger(__name__)


class Tuned(list[Decision]):
    """A list of the decisions for a model. Its text is one line: a step's gain over PyTorch."""

    gain: gain.Total
    """The sums over the convolutions of a step: ``pytorch_ms``, ``ours_ms``, ``ratio``."""
    calls: Mapping[ConvProblem, int]
    """The number of a step's calls of each problem."""

    def __init__(
        self,
        decisions: Iterable[Decision],
        calls: Mapping[ConvProblem, int],
        subject: str,
        took_s: float | None = None,
    ) -> None:
        super().__init__(decisions)
        self.gain = gain.total(self, calls)
        self.calls, self._line = calls, self.gain.line(subject, is_step=True, took_s=took_s)

    @property
    def speedup(self) -> float | None:
        """PyTorch's time of the step's convolutions over ours; None without a comparison."""
        return self.gain.ratio

    def __repr__(self) -> str:
        return self._line

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        for one in self:
            against, chosen = gain.against_pytorch(one), one.chosen
            rows.append(
                (
                    one.problem.text,
                    self.calls.get(one.problem, 0),
                    chosen.candidate.text if chosen else "aten",
                    None if against is None else f"{against.ratio:.2f}",
                )
            )
        return html_table(self._line, rows, ("problem", "calls", "chosen", "PyTorch / chosen"))


def tune(
    model: nn.Module,
    *inputs: Any,
    train: bool = True,
    budget_s: float | None = None,
    memory_format: Literal["auto"] | None = None,
    **kwargs: Any,
) -> Tuned:
    """Tunes the problems of ``model(*inputs, **kwargs)``, so that its first step does not wait.

    The model runs once, with cuDNN's heuristics, which shows its problems and their numbers of
    calls in a step. Afterwards all is as it was (see ``distributed.problems_of``). Then all
    problems are raced together: the problem with the largest possible gain has the next round. The
    race ends when the step's convolutions are expected to be no more than 0.2 % slower than with
    the fastest candidates. Plans are compiled on all cores meanwhile. Each decision is stored and
    in force as soon as it is made. Decisions of an earlier call are not raced again, unless the
    budget or an interruption cut their race short.

    This holds for the default mode, ``auto``. With a locked store nothing is raced: its decisions
    are in force, and PyTorch's own path where it has none. If another mode is in force, each
    problem is tuned in that mode, one after the other. A layer whose ``sampling=`` differs from the
    mode in force still tunes at its first call. A terminal or a notebook shows a progress bar. At
    the end one line has a step's gain over PyTorch: on a terminal's standard error, elsewhere in
    the log at level INFO.

    Args:
        model: on one CUDA device, with layers of this package, or under ``enable()``.
        inputs, kwargs: as for a call of the model.
        train: whether the backward is tuned, too; the state of the model's modules stays as it is.
        budget_s: seconds of wall time after which no further round of a race begins; None: no
            limit; 0: no timing. Begun rounds and compilations are finished, and raced problems are
            checked and stored, unless an earlier decision has more timed launches. Problems that
            were not timed and have no decision are served by the heuristics' first plan in this
            process, and are not stored.
        memory_format: ``"auto"`` tunes the model contiguous and in channels_last, times its step in
            both, as ``cudnn_autotune.convert`` does, and gives the model the faster layout. The
            model must not be wrapped for several GPUs. None: the model is tuned as it is.

    Returns:
        The decisions, in the order in which a step calls their problems, a list whose text is that
        line, and whose ``speedup`` is its ratio. PyTorch's time is its default's, from the same
        races; with ``"auto"`` the step is in the layout that the model got. Without a CUDA device,
        or with a CPU-only torch, the list is empty, and the log says so once.

    Raises:
        TypeError: ``model`` is no module, or its forward takes no such ``inputs``; ``budget_s`` is
            no number, or ``train`` no bool.
        ValueError: ``budget_s`` is negative or not finite, or is given for another mode than
            ``auto``; ``memory_format`` is another value, or ``"auto"`` for a wrapped model; the
            mode in force decides in later calls (``online``); the model has no convolution that
            this package serves, is on several devices, or has lazy parameters.
        KeyboardInterrupt: problems raced until then are decided and stored, as with a spent budget,
            and the line is on them.
        Exception: the model's. Without a CUDA device its forward runs once without gradients, and
            raises a ValueError that names ``inputs``.
    """
    check_arguments(model, train, memory_format)
    mode = mode_for(budget_s)
    name = passes(type(model).__name__, train)
    check_inputs(model, inputs, kwargs)
    if not can_tune():
        try_inputs(model, inputs, kwargs)
        return Tuned([], {}, name)
    found = find_in(memory_format, train, model, inputs, kwargs)
    if found.device is None:
        raise ValueError(NOTHING_SERVED)
    begin_s = time.monotonic()
    try:
        with _bar() as report, events.SEARCHES.shown_elsewhere():
            decisions = tune_problems(found.counts, found.device, mode, budget_s, report)
    except KeyboardInterrupt:
        decided = [
            c.decision for c in choices() if c.problem in found.counts and c.sampling == mode
        ]
        calls = calls_in(found, layouts.CANDIDATES[0] if memory_format else None)
        _announce(Tuned(decided, calls, name, time.monotonic() - begin_s))
        raise
    took_s, chosen = time.monotonic() - begin_s, None
    if memory_format == "auto":
        with torch.set_grad_enabled(train):
            chosen = layouts.choose(model, inputs, kwargs).chosen
    made = Tuned(decisions, calls_in(found, chosen), name, took_s)
    _announce(made)
    return made


def _announce(made: Tuned) -> None:
    if _is_terminal():
        print(made, file=sys.stderr)
    else:
        _log.info("%s", made)


def passes(model: str, train: bool) -> str:
    """Returns a model's name with its tuned passes."""
    return f"{model}, forward{' + backward' if train else ''}"


def check_arguments(model: object, train: object, memory_format: object) -> None:
    """Raises TypeError or ValueError naming the forbidden argument of :func:`tune`."""
    check_model(model)
    if not isinstance(train, bool):
        raise TypeError(f"train must be a bool, got {type(train).__name__}")
    if memory_format not in (None, "auto"):
        raise ValueError(f"memory_format must be None or 'auto', got {memory_format!r}")


def mode_for(budget_s: float | None) -> str:
    """Returns the mode in force; raises as :func:`tune` for a refused mode or budget."""
    mode = settings.registered_mode(settings.get_sampling())
    check_budget(budget_s, mode)
    if sampling.traits(mode).decides_later:
        raise ValueError(
            f"sampling must be a mode that decides at once, and {mode!r} decides in later calls; "
            "set another for this call: with cudnn_autotune.flags('auto')"
        )
    return mode


def find_in(
    memory_format: str | None,
    train: bool,
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Found:
    """Returns the problems of the model as it is, or in both layouts; with ``train`` the
    backward's, too."""
    with torch.set_grad_enabled(train):
        if memory_format is None:
            return find(model, inputs, kwargs)
        in_both = layouts.in_each(model, lambda: find(model, inputs, kwargs))
    counts = {problem: n for found in in_both for problem, n in found.counts.items()}
    device = next((found.device for found in in_both if found.device is not None), None)
    return Found(counts, device, by_layout=tuple(found.counts for found in in_both))


def calls_in(found: Found, chosen: torch.memory_format | None) -> Mapping[ConvProblem, int]:
    """Returns the numbers of calls of a step, in the chosen layout if two were tried."""
    return found.by_layout[layouts.CANDIDATES.index(chosen)] if chosen else found.counts


def can_tune() -> bool:
    """Returns whether there is a CUDA device, and a build that can tune on it; if not, the log says
    once why.

    A program that tunes its models runs everywhere, as ``enable()`` and ``prefetch()`` do.
    """
    if extension_available() and torch.cuda.is_available():
        return True
    _say_that_nothing_is_tuned()
    return False


def try_inputs(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs the model's forward where nothing is tuned, so that a program's error is found there."""
    check_initialized(model)
    if is_among_ranks():  # the others may not run theirs
        return
    try:
        with torch.no_grad():
            run_once(model, inputs, kwargs)
    except Exception as error:  # the user's own code runs here
        reason = f"{type(error).__name__}: {error}"
        text = f"inputs must be what {type(model).__name__} takes, and it raises {reason}"
        raise ValueError(text) from error


@cache
def _say_that_nothing_is_tuned() -> None:
    why = "there is no CUDA device here" if extension_available() else "this torch has no CUDA"
    _log.warning("tune() tunes nothing: %s", why)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _bar() -> AbstractContextManager[Callable[[Progress], None]]:
    """Returns the progress bar in a terminal or a notebook; elsewhere a context without one."""
    console = bar_console()
    return nullcontext(lambda progress: None) if console is None else progress_bar(console)


def check_budget(budget_s: object, mode: str) -> None:
    """Raises TypeError or ValueError unless it is None or, in a mode that races models, a number of
    seconds of 0 or more."""
    if budget_s is None:
        return
    if not sampling.traits(mode).races_models:
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
    retune: bool = False,
) -> list[Decision]:
    """Tunes problems on a CUDA device, in one race if ``mode`` is ``auto``; see :func:`tune`."""
    with torch.cuda.device(device):
        if sampling.traits(mode).races_models and not store_settings.is_locked():
            # It needs the compiled extension, without which this module is imported, too.
            with IMPORTING:
                from cudnn_autotune.tuning.gpu_searches import GpuSearches

            with GpuSearches(device, mode, retune) as searches:
                return tune_together(calls, searches, budget_s, report)
        made: list[Decision] = []
        for problem in calls:
            report(Progress(len(made), len(calls), None))
            made.append(tune_problem.tune(problem, device, mode, retune=retune))
        return made
