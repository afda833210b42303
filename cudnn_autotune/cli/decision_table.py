"""Prints decisions: as a table, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cudnn_autotune.cli import wording
from cudnn_autotune.cli.far import Far, far
from cudnn_autotune.cli.report.section import when
from cudnn_autotune.core.display import NONE, milliseconds, printable
from cudnn_autotune.engines.roofline import Peaks, limit
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import gain

_PIPE_WIDTH = 150


def console(err: bool = False) -> Console:
    """The console of standard output or error; wide in logs and pipes, where 80 columns cut
    numbers."""
    found = Console(stderr=err)
    return found if found.is_terminal else Console(width=_PIPE_WIDTH, stderr=err)


def show(
    console: Console,
    decisions: Iterable[Decision],
    title: str,
    note: str = "",
    peaks: Peaks | None = None,
) -> None:
    """Prints the table, with limits if the GPU's peaks are known."""
    columns = (("problem", 3), ("engine, and why", 4), ("time, ms", 0))
    rows = (_cells(decision, far(decision, peaks)) for decision in decisions)
    _print(console, columns, rows, title, note)


def show_farthest(console: Console, found: Iterable[Far], title: str, note: str = "") -> None:
    """Prints the table of decisions that are far from their limits, in their order."""
    numbers = ("time, ms", "limit, ms", "time / limit", "to be won, ms")
    columns = (("problem", 3), ("engine", 2), *((name, 0) for name in numbers), ("bound by", 1))
    _print(console, columns, map(_far_cells, found), title, note)


def _print(
    console: Console,
    columns: Sequence[tuple[str, int]],
    rows: Iterable[Sequence[tuple[str, ...]]],
    title: str,
    note: str,
) -> None:
    """Prints a table in a terminal; elsewhere a line for each row, its cells apart by tabs.

    Args:
        columns: The name of each column and its share of the width; 0 stands for numbers, which
            are aligned right and never folded.
    """
    if not console.is_terminal:
        head = [[title], [name for name, _ in columns]] if title else []
        for line in (*head, *(map(_joined, row) for row in rows), [note]):
            cells = [printable(cell) for cell in line]
            if any(cells):
                print(*cells, sep="\t", file=console.file)  # rich would expand the tabs
        return
    made = Table(title_justify="left", caption_justify="left")
    made.title = Text(printable(title)) if title else None
    made.caption = Text(printable(note), overflow="fold") if note else None
    for name, share in columns:
        if share:
            made.add_column(name, overflow="fold", ratio=share)
        else:
            made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*(_cell(*lines) for lines in row))
    console.print(made)


def _joined(lines: tuple[str, ...]) -> str:
    return ", ".join(line for line in lines if line)


def _far_cells(one: Far) -> list[tuple[str, ...]]:
    time, least, gain_ms = map(milliseconds, (one.time_ms, one.limit.limit_ms, one.gain_ms))
    return [
        _described(one.decision),
        (one.decision.candidate.text,),
        *((text,) for text in (time, least, wording.ratio(one.times_limit), gain_ms)),
        (one.limit.bound_by,),
    ]


def print_json(
    head: dict[str, Any],
    decisions: Iterable[Decision],
    peaks: Peaks | None = None,
    more: Callable[[Decision], dict[str, Any]] = lambda decision: {},
) -> None:
    """Prints the head's fields and the decisions as one document.

    Args:
        peaks: those of the GPU; without them no limits are printed.
        more: further fields of a decision.
    """
    trees = []
    for decision in decisions:
        against = gain.against_pytorch(decision)
        limits = {} if peaks is None else {"limit": asdict(limit(decision.problem, peaks))}
        gained = {"gain": None if against is None else against.to_json()}
        trees.append(
            {"key": decision.key, **limits, **more(decision), **gained, **decision.to_json()}
        )
    click.echo(json.dumps({**head, "decisions": trees}, indent=1, allow_nan=False))


def _cells(decision: Decision, distance: Far | None) -> list[tuple[str, ...]]:
    """The lines of each cell in a decision's row."""
    chosen = decision.chosen
    candidate = decision.candidate
    rule = decision.selection.evidence.rule_in_words if chosen else "every other's output was wrong"
    time = milliseconds(chosen.time_ms if chosen else None)
    interval = wording.interval(chosen.low_ms, chosen.high_ms) if chosen else ""
    alone = milliseconds(chosen.sustained_ms if chosen else None)
    facts = [decision.sampling, when(decision.provenance.time)]
    if candidate.workspace_bytes:
        facts.insert(0, f"workspace {wording.size(candidate.workspace_bytes)}")
    times = [time, interval, "" if alone == NONE else f"alone {alone}"]
    if distance is not None:
        times.append(f"limit {milliseconds(distance.limit.limit_ms)}")
        times.append(f"{wording.ratio(distance.times_limit)} {distance.limit.bound_by}")
    return [_described(decision), (candidate.text, rule, ", ".join(facts)), tuple(times)]


def _described(decision: Decision) -> tuple[str, str]:
    """The problem, and what it is measured for, in two lines."""
    problem = decision.problem
    types = f"{wording.dtype(problem)} {wording.layout(problem)}"
    name = f"{problem.op} {wording.shapes(problem)}"
    return name, ", ".join([types, *_constraints(decision)])


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
    cell = Text(printable(first))
    for line in filter(None, others):
        cell.append(f"\n{printable(line)}", style="dim")
    return cell
