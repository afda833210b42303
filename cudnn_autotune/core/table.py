"""A table of texts, which prints and renders as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from cudnn_autotune.core.display import printable

_LONGEST_CELL = 400
_FOLDED = 24  # a text column that may fold is at least this wide
_FRAME = 3  # the blanks of a column, and the line on its left


@dataclass
class Table:
    """A title, headers (``columns``) and rows.

    The first ``texts`` columns are aligned left, the others right.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    note: str = ""
    texts: int = 1

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        numbers = len(self.columns) - self.texts
        parts = [f"**{self.title}**", "", line(self.columns)]
        parts.append("|" + "---|" * self.texts + "---:|" * numbers)
        parts += [line(row) for row in self.rows]
        if self.note:
            parts += ["", self.note]
        return "\n".join(parts)

    def show(self, console: Console) -> None:
        """Prints the table in a terminal; elsewhere each row is a line, with tabs between cells."""
        if console.is_terminal:
            console.print(*self.rich(console.width), sep="\n")
            return
        lines = [[self.title], self.columns, *self.rows, [self.note]]
        for line in filter(any, lines):
            print(*map(printable, line), sep="\t", file=console.file)  # rich would expand the tabs

    def rich(self, width: int) -> list[RichTable]:
        """Returns tables that fit into ``width`` columns: one, or several that repeat the texts."""
        texts = list(range(self.texts))
        taken = sum(min(self._width(index), _FOLDED) for index in texts) + 1
        parts: list[list[int]] = [[]]
        left = width - taken
        for index in range(self.texts, len(self.columns)):
            left -= self._width(index)
            if left < 0 and parts[-1]:
                parts.append([])
                left = width - taken - self._width(index)
            parts[-1].append(index)
        tables = [self._part([*texts, *numbers]) for numbers in parts]
        tables[0].title = self.title
        tables[-1].caption = Text(self.note) if self.note else None
        return tables

    def _part(self, indices: Sequence[int]) -> RichTable:
        table = RichTable(title_justify="left", caption_justify="left")
        for index in indices:
            # Only the last of several text columns folds.
            may_be_long = index == self.texts - 1 and self.texts > 1
            table.add_column(
                self.columns[index] if may_be_long else self._header(index),
                justify="left" if index < self.texts else "right",
                overflow="fold",
                no_wrap=not may_be_long,
            )
        for row in self.rows:
            # In a Text, square brackets are no markup.
            table.add_row(*(Text(printable(row[index][:_LONGEST_CELL])) for index in indices))
        return table

    def _header(self, index: int) -> str:
        """Returns a header on lines of whole words that do not widen the column."""
        return textwrap.fill(self.columns[index], self._width(index) - _FRAME)

    def _width(self, index: int) -> int:
        """Returns the width, with frame, at which the column cuts neither a cell nor a word."""
        cells = (row[index][:_LONGEST_CELL] for row in self.rows)
        return max(map(cell_len, (*self.columns[index].split(), *cells))) + _FRAME
