"""Times and counts as texts, tables for notebooks, and progress bars."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Item = TypeVar("Item")

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


class Bar(float):
    """A cell of :func:`html_table` that is drawn as a bar: its length, from 0 to 1."""


def html_table(title: str, rows: Iterable[Sequence[object]], columns: Sequence[object] = ()) -> str:
    """Returns a title, the columns' names and rows of cells as HTML. Texts are escaped, and their
    unprintable characters replaced by a sign. None is an empty cell."""

    def text(cell: object) -> str:
        if isinstance(cell, Bar):
            style = f"width:{10 * cell:.2f}em;height:.8em;background:#0072b2"
            return f'<div style="{style}"></div>'
        return "" if cell is None else escape(printable(str(cell)))

    def line(cells: Sequence[object], kind: str) -> str:
        made = (f'<{kind} style="text-align:left">{text(cell)}</{kind}>' for cell in cells)
        return f"<tr>{''.join(made)}</tr>"

    head = f"<thead>{line(columns, 'th')}</thead>" if columns else ""
    body = "".join(line(row, "td") for row in rows)
    return f"<p><b>{escape(printable(title))}</b></p><table>{head}<tbody>{body}</tbody></table>"


class Listed(list[Item]):
    """A list that a notebook shows as a table with a row for each entry.

    Args:
        items: the entries.
        noun: what an entry is, for the title.
        columns: the columns' names.
        row: the cells of an entry.
    """

    def __init__(
        self,
        items: Iterable[Item],
        noun: str,
        columns: Sequence[str],
        row: Callable[[Item], Sequence[object]],
    ) -> None:
        super().__init__(items)
        self._noun, self._columns, self._row = noun, columns, row

    def __reduce__(self) -> tuple[type[list[Item]], tuple[list[Item]]]:
        return list, (list(self),)  # copied or pickled it is a plain list

    def _repr_html_(self) -> str:
        return html_table(count(len(self), self._noun), map(self._row, self), self._columns)


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
