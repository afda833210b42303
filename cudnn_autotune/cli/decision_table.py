"""Prints decisions as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cudnn_autotune.cli import wording
from cudnn_autotune.cli.report.reasons import when
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.store import Decision

_PIPE_WIDTH = 150


def console() -> Console:
    """The console of standard output; wide in logs and pipes, where 80 columns cut numbers."""
    found = Console()
    return found if found.is_terminal else Console(width=_PIPE_WIDTH)


def show(console: Console, decisions: Iterable[Decision], title: str, note: str = "") -> None:
    """Prints the table."""
    made = Table(title=Text(wording.printable(title)), title_justify="left", caption_justify="left")
    made.caption = Text(wording.printable(note), overflow="fold") if note else None
    made.add_column("problem", overflow="fold", ratio=3)
    made.add_column("engine, and why", overflow="fold", ratio=4)
    made.add_column("time, ms", justify="right", no_wrap=True)
    for decision in decisions:
        made.add_row(*(_cell(*lines) for lines in _cells(decision)))
    console.print(made)


def _cells(decision: Decision) -> list[tuple[str, ...]]:
    """The lines of each cell in a decision's row."""
    problem, chosen = decision.problem, decision.chosen
    candidate = chosen.candidate if chosen else ATEN
    types = f"{wording.dtype(problem)} {wording.layout(problem)}"
    rule = decision.selection.evidence.rule if chosen else "every other's output was wrong"
    time = wording.milliseconds(chosen.time_ms if chosen else None)
    interval = wording.interval(chosen.low_ms, chosen.high_ms) if chosen else ""
    alone = wording.milliseconds(chosen.sustained_ms if chosen else None)
    name = f"{problem.op} {wording.shapes(problem)}"
    first = (name, ", ".join([types, *_constraints(decision)]))
    facts = [decision.sampling, when(decision.provenance.time)]
    if candidate.workspace_bytes:
        facts.insert(0, f"workspace {wording.size(candidate.workspace_bytes)}")
    times = (time, interval, "" if alone == wording.NONE else f"alone {alone}")
    return [first, (candidate.text, rule, ", ".join(facts)), times]


def _constraints(decision: Decision) -> Iterable[str]:
    conditions = wording.conditions(decision.problem)
    if conditions:
        yield conditions
    if decision.problem.deterministic:
        yield "deterministic"
    if decision.workspace_limit is not None:
        yield f"at most {wording.size(decision.workspace_limit)}"
    if decision.benchmark_limit:
        yield f"benchmark limit {decision.benchmark_limit}"


def _cell(first: str, *others: str) -> Text:
    # In a Text square brackets are no markup.
    cell = Text(wording.printable(first))
    for line in filter(None, others):
        cell.append(f"\n{wording.printable(line)}", style="dim")
    return cell
