"""A small table that prints in a terminal (rich) and renders as Markdown from the same rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Table:
    """`columns` headers, `rows` of texts; the first column is left-aligned, the others right."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = dataclasses.field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

        parts = [f"**{self.title}**", ""]
        parts += [line(self.columns), "|" + "|".join(["---", *["---:"] * (len(self.columns) - 1)])]
        parts[-1] += "|"
        parts += [line(row) for row in self.rows]
        if self.note:
            parts += ["", self.note]
        return "\n".join(parts)

    def show(self) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", caption=self.note or None)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        # Records are read in logs as well: do not let an 80-column pipe cut the numbers.
        console = Console()
        console = console if console.is_terminal else Console(width=140)
        console.print(table)


def dry_run_note(data: dict[str, Any]) -> str:
    """What is added to a table's note where the record is not of a GPU."""
    return " DRY RUN: on a simulated GPU." if data["environment"].get("device") == "cpu" else ""


def percent(ratio: float, digits: int = 1) -> str:
    """1.034 -> "+3.4 %"."""
    return f"{(ratio - 1) * 100:+.{digits}f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
