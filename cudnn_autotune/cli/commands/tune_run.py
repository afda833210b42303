"""Tuning problems one after another: a line for each choice, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cudnn_autotune.cli import wording
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store import Decision, Store
from cudnn_autotune.tuning import events

Tune = Callable[[ConvProblem], Decision]


class DeviceLost(RuntimeError):
    """Nothing can be tuned any more in this process."""


@dataclass
class Outcome:
    decisions: list[Decision] = field(default_factory=list)
    known: int = 0
    """How many of them the store had already."""
    failed: list[tuple[ConvProblem, str]] = field(default_factory=list)
    """And why."""


class Estimate:
    """How long the rest will take, from how long the first ones took.

    A search takes a while however small its problem is, and longer for a large one: half of the
    work counts equally for each problem, half by its floating-point operations.

    Args:
        problems: all there are to tune, in the order in which they are told of by :meth:`done`.
    """

    def __init__(self, problems: Sequence[ConvProblem]) -> None:
        work = [problem.flops for problem in problems]
        total = sum(work) or 1.0
        self._shares = [0.5 / len(work) + 0.5 * each / total for each in work]
        self._next = 0
        self._elapsed_s = 0.0

    def done(self, elapsed_s: float) -> None:
        """The next problem took so long."""
        self._next += 1
        self._elapsed_s += elapsed_s

    @property
    def left_s(self) -> float | None:
        """None before the first one is done."""
        share = sum(self._shares[: self._next])
        return self._elapsed_s * (1 - share) / share if self._next else None


def run(
    problems: Sequence[ConvProblem],
    tune: Tune,
    store: Store,
    known: Callable[[ConvProblem], Decision | None],
    console: Console,
) -> Outcome:
    """Tunes what is not ``known``, and keeps each decision as soon as it is made.

    Args:
        tune: raises RuntimeError for a problem that cannot be tuned; the others go on.

    Raises:
        DeviceLost: the GPU fails; what was decided until then is in the store.
    """
    outcome = Outcome()
    found = {problem: known(problem) for problem in problems}
    estimate = Estimate([problem for problem in problems if found[problem] is None])
    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn())
    left = TextColumn("{task.fields[left]}")
    bar = Progress(*columns, TimeElapsedColumn(), left, console=console, transient=True)
    with events.SEARCHES.shown_elsewhere(), bar as progress:
        task = progress.add_task("tuning", total=len(problems), left="")
        for problem in problems:
            decision = found[problem]
            if decision is not None:
                outcome.known += 1
                outcome.decisions.append(decision)
                _say(console, problem, f"{_told(decision)}, known already")
            else:
                start_s = time.perf_counter()
                decision, why = _tuned(problem, tune)
                if decision is None:
                    outcome.failed.append((problem, why))
                    _say(console, problem, f"not tuned: {why}")
                else:
                    outcome.decisions.append(decision)
                    timed = decision.selection.total_samples > 0
                    if timed:
                        store.add([decision])
                    _say(
                        console, problem, _told(decision) + ("" if timed else ", nothing was timed")
                    )
                estimate.done(time.perf_counter() - start_s)
            left_s = estimate.left_s
            told = "" if left_s is None else f"about {wording.duration(1e3 * left_s)} left"
            progress.update(task, advance=1, left=told)
    return outcome


def _tuned(problem: ConvProblem, tune: Tune) -> tuple[Decision | None, str]:
    try:
        return tune(problem), ""
    except torch.OutOfMemoryError as error:
        return None, f"out of memory: {str(error).splitlines()[0]}"
    except RuntimeError as error:
        # The context is gone, and whatever comes next would fail as well.
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            raise DeviceLost(f"{problem.op} {wording.shapes(problem)}: {error}") from error
        return None, str(error)


def _say(console: Console, problem: ConvProblem, text: str) -> None:
    name = f"{problem.op} {wording.shapes(problem)}"
    # No markup: texts have brackets.
    line = wording.printable(f"{name}: {text}")
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _told(decision: Decision) -> str:
    chosen = decision.chosen
    if chosen is None:
        return "aten: every other's output was wrong"
    ms = chosen.reported_ms
    parts = [chosen.candidate.text]
    if ms is not None:
        parts.append(f"{wording.milliseconds(ms)} ms")
    if chosen.candidate.workspace_bytes:
        parts.append(f"workspace {wording.size(chosen.candidate.workspace_bytes)}")
    if decision.selection.evidence.rule:
        parts.append(decision.selection.evidence.rule)
    return ", ".join(parts)
