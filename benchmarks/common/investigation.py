"""A script whose cases run one after the other in this process, and each adds rows to one table."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .record import Record

Row = dict[str, Any]
"""Column -> a text or a number, or None; each row of a script has the same columns."""


def fill(
    script: str,
    options: argparse.Namespace,
    names: Sequence[str],
    measure: Callable[[str, list[str]], Iterable[Row]],
    title: str,
) -> int:
    """Fills the record of ``options.json``, prints its table, and returns the exit status.

    Args:
        names: of the cases. None begins after ``options.time_limit`` seconds.
        measure: a case's name, and the list of failures, to which it may add -> its rows. What it
            raises is recorded as the case's failure.
    """
    record = Record(Path(script).stem, options)
    record.results["title"] = title
    rows, failures = record.list_of("rows"), record.list_of("failures")
    begin = time.monotonic()
    with record:
        for index, name in enumerate(names):
            if time.monotonic() - begin > options.time_limit:
                failures.append(f"time limit: {len(names) - index} cases not measured")
                break
            known = len(failures)
            try:
                rows += [{"case": name, **row} for row in measure(name, failures)]
            except Exception as error:  # the other cases still count
                failures.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            print(*(failures[known:] or [f"{name}: done"]), sep="\n", file=sys.stderr)
            record.save()
            gc.collect()
    return record.end(not failures, tables)


def tables(data: dict[str, Any]) -> list[Any]:
    """Of the record of such a script."""
    from .tables import NONE, Table, dry_run_note

    results = data["results"]
    columns = list(results["rows"][0]) if results["rows"] else ["case"]
    note = " ".join(f"{failure}." for failure in results["failures"]) + dry_run_note(data)
    table = Table(results["title"], columns, note=note)
    for row in results["rows"]:
        cells = (NONE if value is None else value for value in row.values())
        table.rows.append([f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells])
    return [table]
