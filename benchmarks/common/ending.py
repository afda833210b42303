"""How every script ends: its tables, and its plot where one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .tables import Table, show_table


def show(
    data: dict[str, Any],
    tables: Callable[[dict[str, Any]], Iterable[Table]],
    plot: Callable[[dict[str, Any], Path], None] | None = None,
    path: Path | None = None,
) -> None:
    for table in tables(data):
        show_table(table)
    if plot and path:
        plot(data, path)
