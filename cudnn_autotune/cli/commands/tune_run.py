"""Tunes problems one after another, with a line for each choice and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cudnn_autotune.cli import wording
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store import Decision, Store
from cudnn_autotune.tuning import events

Tune = Callable[[ConvProblem], Decision]
# The remaining time is estimated from all searches, which differ much, not from the last ones.
_ESTIMATED_OVER_S = 3600.0


class DeviceLost(RuntimeError):
    """The GPU failed, and this process cannot tune any more."""


@dataclass
class Tuned:
    """The decisions of a run, and the problems that failed."""

    decisions: list[Decision] = field(default_factory=list)
    known: int = 0
    """The number of decisions that the store already had."""
    failed: list[tuple[ConvProblem, str]] = field(default_factory=list)
    """The problems without a decision, and the error of each."""
    is_interrupted: bool = False
    """Whether Ctrl-C ended the run."""


def run(
    problems: Sequence[ConvProblem],
    tune: Tune,
    store: Store,
    known: Callable[[ConvProblem], Decision | None],
    console: Console,
) -> Tuned:
    """Tunes the problems that are not ``known``, and stores each decision as soon as it is made. If
    ``tune`` raises RuntimeError for a problem, the others go on, unless the GPU fails (DeviceLost).
    Ctrl-C ends the run.
    """
    made = Tuned()
    found = {problem: known(problem) for problem in problems}
    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns,
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        speed_estimate_period=_ESTIMATED_OVER_S,
    )
    with events.SEARCHES.shown_elsewhere(), bar as progress:
        task = progress.add_task("tuning", total=sum(each is None for each in found.values()))
        for problem, decision in found.items():
            if decision is not None:
                made.known += 1
                note = ", known already"
            else:
                try:
                    decision = _tuned(problem, tune)
                except KeyboardInterrupt:
                    made.is_interrupted = True
                    break
                except _NotTuned as error:
                    made.failed.append((problem, str(error)))
                    _say(console, problem, f"not tuned: {error}")
                    continue
                finally:
                    progress.advance(task)
                note = ", nothing was timed"
                if provisional := decision.selection.evidence.provisional:
                    note = f", not kept: provisional, {provisional}"
                elif decision.selection.total_samples > 0:
                    store.add([decision])
                    note = ""
            made.decisions.append(decision)
            _say(console, problem, _described(decision) + note)
    return made


class _NotTuned(Exception):
    """One problem cannot be tuned."""


def _tuned(problem: ConvProblem, tune: Tune) -> Decision:
    try:
        return tune(problem)
    except torch.OutOfMemoryError as error:
        raise _NotTuned(f"out of memory: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        # After such an error the CUDA context is unusable, and every later call fails as well.
        if is_device_lost(error):
            raise DeviceLost(f"{problem.op} {wording.shapes(problem)}: {error}") from error
        raise _NotTuned(str(error)) from error


def is_device_lost(error: RuntimeError) -> bool:
    """Returns whether no call after this error can succeed on the GPU."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _say(console: Console, problem: ConvProblem, text: str) -> None:
    line = wording.printable(f"{problem.op} {wording.shapes(problem)}: {text}")
    # The texts are not parsed as markup, since they contain brackets.
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _described(decision: Decision) -> str:
    chosen = decision.chosen
    if chosen is None:
        return "aten: every other's output was wrong"
    parts = [chosen.candidate.text]
    if chosen.reported_ms is not None:
        parts.append(f"{wording.milliseconds(chosen.reported_ms)} ms")
    if chosen.candidate.workspace_bytes:
        parts.append(f"workspace {wording.size(chosen.candidate.workspace_bytes)}")
    if rule := decision.selection.evidence.rule_in_words:
        parts.append(rule)
    return ", ".join(parts)
