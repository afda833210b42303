"""A script that repeats the measurement that a page of docs/findings rests on: its cases run one
after the other in this process, and each adds rows to one table. It needs a GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import arguments, cases

Row = dict[str, Any]
"""Column -> a text or a number, or None; each row of a script has the same columns."""


def run(
    script: str,
    description: str | None,
    default_cases: Sequence[str],
    measure: Callable[[Any], Iterator[Row]],
    title: str,
    *,
    are_layers: bool = True,
) -> int:
    """The script's ``main``; returns its exit status.

    Args:
        script: its file, after which the record is named.
        description: its docstring, for ``--help``.
        default_cases: parts of case ids; without ``are_layers``, what ``measure`` takes.
        measure: a case -> its rows. What it raises is recorded as the case's failure.
        title: of the table.
        are_layers: whether cases are ``audit.layers.Case`` of a layer list; otherwise texts.
    """
    p = arguments.parser(description, has_dry_run=False)
    p.add_argument("--time-limit", type=float, default=240, help="begins no case after so many s")
    if are_layers:
        cases.add_options(p, default_cases)
    else:
        p.add_argument("--cases", default=",".join(default_cases), help="%(default)s")
    options = p.parse_args()
    wanted: list[Any] = options.cases.split(",")
    if are_layers:
        wanted = cases.wanted(options.layers, options.cases)
    arguments.check_gpu(script)
    import torch

    from .record import Record
    from .tables import show
    from .telemetry import Telemetry

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = True
    record = Record(Path(script).stem, options.json, device="cuda", arguments=vars(options))
    rows: list[Row] = []
    failures: list[str] = []
    record.results.update(title=title, rows=rows, failures=failures)
    begin = time.monotonic()
    with Telemetry() as telemetry:
        for index, case in enumerate(wanted):
            if time.monotonic() - begin > options.time_limit:
                failures.append(f"time limit: {len(wanted) - index} cases not measured")
                break
            name = case.id if are_layers else case
            try:
                rows += [{"case": name, **row} for row in measure(case)]
            except Exception as error:  # the other cases still count
                failures.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
                print(failures[-1], file=sys.stderr)
            record.save(telemetry=telemetry.summary())
    record.save(complete=not failures, telemetry=telemetry.summary())
    show(tables(record.data))
    return 1 if failures else 0


def tables(data: dict[str, Any]) -> list[Any]:
    """Of the record of such a script."""
    from .tables import NONE, Table

    results = data["results"]
    columns = list(results["rows"][0]) if results["rows"] else ["case"]
    table = Table(results["title"], columns, note=" ".join(f"{f}." for f in results["failures"]))
    for row in results["rows"]:
        cells = (NONE if value is None else value for value in row.values())
        table.rows.append([f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells])
    return [table]
