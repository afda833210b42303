"""A table of texts that prints in a terminal and renders as Markdown, from the same rows."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

_LONGEST_CELL = 400
_FOLDED = 24  # of a text that may be longer, at least so much stands on a line
_FRAME = 3  # a column's blanks, and the line at its left


@dataclass
class Table:
    """``columns`` are headers; the first ``texts`` columns are aligned left, the others right."""

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

    def rich(self, width: int) -> list[RichTable]:
        """For a console of ``width`` columns: whole, or in parts that fit, each with the texts."""
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
            may_be_long = index == self.texts - 1 and self.texts > 1  # only the last of the texts
            table.add_column(
                self.columns[index] if may_be_long else self._header(index),
                justify="left" if index < self.texts else "right",
                overflow="fold",
                no_wrap=not may_be_long,
            )
        for row in self.rows:
            # Text: square brackets are no markup.
            table.add_row(*(Text(row[index][:_LONGEST_CELL]) for index in indices))
        return table

    def _header(self, index: int) -> str:
        """On lines of whole words, none longer than need be."""
        return textwrap.fill(self.columns[index], self._width(index) - _FRAME)

    def _width(self, index: int) -> int:
        """That a column takes, its frame included, so that neither cell nor word is cut."""
        cells = (row[index][:_LONGEST_CELL] for row in self.rows)
        return max(map(cell_len, (*self.columns[index].split(), *cells))) + _FRAME
