"""A table of texts that prints in a terminal and renders as Markdown, from the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table as RichTable
from rich.text import Text

_LONGEST_CELL = 400


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

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", caption_justify="left")
        table.caption = Text(self.note) if self.note else None
        for index, column in enumerate(self.columns):
            table.add_column(
                column,
                justify="left" if index < self.texts else "right",
                overflow="fold",
                # Only the last text may be long.
                no_wrap=index != self.texts - 1 or self.texts == 1,
            )
        for row in self.rows:
            # Text: square brackets are no markup.
            table.add_row(*(Text(cell[:_LONGEST_CELL]) for cell in row))
        return table
