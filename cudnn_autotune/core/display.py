"""A table for notebooks, from texts that are escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """Returns a title and rows of cells as HTML; None is an empty cell."""
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:left">{"" if cell is None else escape(str(cell))}</td>'
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<p><b>{escape(title)}</b></p><table><tbody>{body}</tbody></table>"
