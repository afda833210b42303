"""What scripts have in common that measure layers of a list, each in a worker of its own."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import arguments, ending
from .cases import add_options, wanted

Entry = dict[str, Any]


def parser(
    description: str | None, cases: Sequence[str], time_limit_s: float
) -> argparse.ArgumentParser:
    """``arguments.parser``, with ``--cases``, ``--layers``, ``--time-limit`` and ``--worker``."""
    p = arguments.parser(description)
    add_options(p, ",".join(cases))
    p.add_argument("--time-limit", type=float, default=time_limit_s, help="seconds for all layers")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def check_least(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Exits where an option, by its name in ``options``, is below its least value."""
    for name, value in least.items():
        if getattr(options, name) < value:
            option = name.replace("_", "-")
            sys.exit(f"--{option} must be {value} or more, got {getattr(options, name)}")


def keep(entry: Entry, part: dict[str, Any], lists: Mapping[str, str]) -> None:
    """Adds what a worker told to its case's entry.

    Args:
        part: its kind is its ``part``.
        lists: kind -> the entry's list of such parts. Of other kinds there is one each.
    """
    kind = part.pop("part")
    if kind in lists:
        entry[lists[kind]].append(part)
    elif kind == "failed":
        entry["failed"].append(part)
    else:
        entry[kind] = part or True


def measured(
    script: str,
    options: argparse.Namespace,
    report: Any,
    *,
    ask: Callable[[dict[str, Any], float], tuple[dict[str, Any], float]],
    new_entry: Callable[[], Entry],
    keep: Callable[[Entry, dict[str, Any], Any], None],
    period_s: float,
    least_s: float = 0.0,
    last: str = "finished",
) -> int:
    """Measures the layers that ``options`` name into a record, and shows it.

    Args:
        script: the file, which gives the record its name.
        report: a module with ``tables`` and ``plot``.
        ask, new_entry, least_s: as ``layer_workers.measure_layers``.
        keep: adds a part to an entry; it is given the telemetry, too.
        period_s: between two looks at the GPU.
        last: what an entry has once its layer is done.

    Returns:
        The exit status: 0 where all layers are done.
    """
    from .layer_workers import measure_layers
    from .record import Record
    from .telemetry import Telemetry

    begin = time.monotonic()
    try:
        cases = wanted(options.layers, options.cases)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    given = {k: v for k, v in vars(options).items() if k != "worker"}
    record = Record(Path(script).stem, options.json, device=options.device, arguments=given)
    with Telemetry(period_s=period_s) as telemetry:
        entries = measure_layers(
            script,
            cases,
            record,
            telemetry,
            time_limit_s=options.time_limit - (time.monotonic() - begin),
            least_s=least_s,
            ask=ask,
            new_entry=new_entry,
            keep=lambda entry, part: keep(entry, part, telemetry),
        )
    complete = all(last in entries.get(case.id, {}) for case in cases)
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, report.tables, report.plot, options.plot)
    return 0 if complete else 1
