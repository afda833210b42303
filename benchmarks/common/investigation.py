"""A script whose cases run one after the other in this process, and each adds rows to one table."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
) -> int:
    """The ``main`` of a script that repeats the measurement of a page of docs/findings. It needs a
    GPU. Returns its exit status.

    Args:
        script: its file, after which the record is named.
        description: its docstring, for ``--help``.
        default_cases: parts of case ids.
        measure: an ``audit.layers.Case`` -> its rows.
        title: of the table.
    """
    p = arguments.parser(description, has_dry_run=False)
    p.add_argument("--time-limit", type=float, default=240, help="begins no case after so many s")
    cases.add_options(p, default_cases)
    options = p.parse_args()
    wanted = {case.id: case for case in cases.wanted(options.layers, options.cases)}
    arguments.check_gpu(script)
    import torch

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = True
    return fill(script, options, "cuda", list(wanted), lambda id, _: measure(wanted[id]), title)


def fill(
    script: str,
    options: argparse.Namespace,
    device: str,
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
    from .record import Record
    from .tables import show
    from .telemetry import Telemetry

    record = Record(Path(script).stem, options.json, device=device, arguments=vars(options))
    rows: list[Row] = []
    failures: list[str] = []
    record.results.update(title=title, rows=rows, failures=failures)
    begin = time.monotonic()
    with Telemetry() as telemetry:
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
            record.save(telemetry=telemetry.summary())
            gc.collect()
    record.save(complete=not failures, telemetry=telemetry.summary())
    show(tables(record.data))
    return 1 if failures else 0


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
