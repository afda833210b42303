"""Times and counts as texts, tables for notebooks, and progress bars."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

NONE = "–"
"""The text of an unknown number."""
_DIGITS = 4


def milliseconds(ms: float | None) -> str:
    """Writes a time in four digits without its unit, or a dash for None."""
    if ms is None:
        return NONE
    if ms <= 0:
        return "0"
    decimals = _DIGITS - 1 - math.floor(math.log10(ms))
    return f"{ms:.{min(max(decimals, 0), 7)}f}"


def count(number: int, noun: str) -> str:
    """Writes a number and a noun, as ``1 problem`` or ``1,234 problems``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Replaces each character of a text that does not print by a sign.

    Names in a file and messages of a user's model are not trusted: such characters could control a
    terminal.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def html_table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """Returns a title and rows of cells as HTML. Texts are escaped, and their unprintable
    characters replaced by a sign. None is an empty cell."""

    def text(cell: object) -> str:
        return "" if cell is None else escape(printable(str(cell)))

    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{text(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f"<p><b>{escape(printable(title))}</b></p><table><tbody>{body}</tbody></table>"


def bar_console() -> Console | None:
    """Returns standard error if it is a terminal, or the cell of a notebook; None elsewhere.

    In a notebook rich draws with ipywidgets, and would warn if that is not installed.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    can_be_notebook = "IPython" in sys.modules and find_spec("ipywidgets") is not None
    if not is_terminal and not can_be_notebook:
        return None
    from rich.console import Console  # most programs need none

    console = Console(stderr=True)
    return console if is_terminal or console.is_jupyter else None


def progress_bar(console: Console) -> Progress:
    """Returns a context manager for a bar that counts finished steps and disappears at the end."""
    from rich import progress

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn())
    counts = (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    return progress.Progress(*columns, *counts, console=console, transient=True)
