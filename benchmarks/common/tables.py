"""Tables that print in a terminal and render as Markdown, and what their cells have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from cudnn_autotune.core.table import Table

__all__ = ["NONE", "Table", "columns", "dry_run_note", "number", "percent", "show"]

NONE = "–"


def show(tables: Iterable[Table]) -> None:
    """Prints tables, 140 columns wide where the output is no terminal."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=140)
    for table in tables:
        console.print(*table.rich(console.width), sep="\n")


def dry_run_note(data: dict[str, Any]) -> str:
    """What is added to a table's note where the record is not of a GPU."""
    return " DRY RUN: on a CPU." if data.get("environment", {}).get("device") == "cpu" else ""


def percent(ratio: float) -> str:
    """1.034 as "+3.4 %"."""
    return f"{(ratio - 1) * 100:+.1f} %"


def columns(text: str) -> list[str]:
    """The headers in ``text``, with a bar between any two."""
    return text.split("|")


def number(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
