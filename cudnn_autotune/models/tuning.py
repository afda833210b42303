"""The tuning of a model's problems together: their order, their number at once, and its duration.

Each decision is committed as soon as its problem's search is over, so that an interruption loses no
decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.model_race import Entrant, ModelRace
from cudnn_autotune.store.decision import Decision

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Progress:
    """The progress of the tuning of a model."""

    decided: int
    problems: int
    expected_loss: float | None
    """The expected relative loss of the step's convolutions to the fastest candidates; None as long
    as some problem was not timed."""


class Searches(Protocol):
    """The open searches of a model's problems; an implementation commits their decisions."""

    def known(self, problem: ConvProblem) -> Decision | None:
        """Returns an earlier decision that needs no further search, or None."""

    def earlier(self, problem: ConvProblem) -> Decision | None:
        """Returns any earlier decision, or None."""

    def room_for(self, problem: ConvProblem) -> bool:
        """Returns whether the problem's operands fit beside the open searches'."""

    def open(self, problem: ConvProblem, calls: int) -> Entrant[ConvProblem] | None:
        """Opens a search; returns None if memory or cuDNN does not allow it."""

    def untimed(self, problem: ConvProblem) -> Decision:
        """Serves a problem by the heuristics' first plan, or PyTorch, for the rest of the
        process."""

    def commit(self, entrant: Entrant[ConvProblem], selection: Selection | None) -> Decision:
        """Checks and serves a search's choice (None: no candidate runs), stores it if it was timed,
        and frees the search's memory."""

    def close(self, entrant: Entrant[ConvProblem]) -> None:
        """Frees the memory of a search without using its result."""


def tune_together(
    calls: Mapping[ConvProblem, int],
    searches: Searches,
    budget_s: float | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    now_s: Callable[[], float] = time.monotonic,
) -> list[Decision]:
    """Returns a decision for each problem, in the order of ``calls``.

    Problems are raced together as far as memory allows, those with the most work first. If the
    budget or an interruption has cut a race short, an earlier decision with no fewer timed launches
    stays. A problem that was not timed and has no decision is served by the heuristics' first plan,
    which is not stored.

    Args:
        calls: number of calls of each problem in a step of the model.
        budget_s: seconds after which no further measurement begins; None: no limit.
        report: called as the race goes on.
        now_s: a clock, in seconds.

    Raises:
        KeyboardInterrupt: problems raced until then are decided and stored; a second one ends that.
    """
    end_s = None if budget_s is None else now_s() + budget_s
    made: dict[ConvProblem, Decision] = {}

    def is_out_of_time() -> bool:
        return end_s is not None and now_s() >= end_s

    def decided(entrant: Entrant[ConvProblem]) -> None:
        problem, selection = entrant.problem, entrant.selection()
        timed = 0 if selection is None else selection.total_samples
        earlier = searches.earlier(problem) if entrant.is_cut else None
        if earlier is not None and earlier.selection.total_samples >= timed:
            searches.close(entrant)
            made[problem] = earlier
        elif selection is not None or (entrant.found.screening.eliminated and not entrant.is_cut):
            made[problem] = searches.commit(entrant, selection)
        else:
            searches.close(entrant)
            made[problem] = searches.untimed(problem)

    def say(race: ModelRace[ConvProblem] | None) -> None:
        loss = None if race is None or waiting else race.expected_loss()
        is_known = loss is not None and loss != float("inf")
        report(Progress(len(made), len(calls), loss if is_known else None))

    waiting = []
    for problem in calls:
        if (known := searches.known(problem)) is None:
            waiting.append(problem)
        else:
            made[problem] = known
    waiting.sort(key=lambda problem: -calls[problem] * problem.flops)
    while waiting:
        entrants: list[Entrant[ConvProblem]] = []
        while waiting and not is_out_of_time() and searches.room_for(waiting[0]):
            entrant = searches.open(waiting[0], calls[waiting[0]])
            if entrant is None:
                break
            entrants.append(entrant)
            del waiting[0]
        if not entrants:
            problem = waiting.pop(0)
            made[problem] = searches.earlier(problem) or searches.untimed(problem)
            continue
        ModelRace(entrants, decided, is_out_of_time, say).run()
    say(None)
    return [made[problem] for problem in calls]


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Shows a bar within the context; yields the function that moves it."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True) as bar:
        task = bar.add_task("tuning", total=None, left="")

        def report(progress: Progress) -> None:
            loss = progress.expected_loss
            left = "timing" if loss is None else f"the step may gain {100 * loss:.2f} %"
            bar.update(task, total=progress.problems, completed=progress.decided, left=left)

        yield report
