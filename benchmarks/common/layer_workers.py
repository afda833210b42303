"""Layers one after the other, each measured by a worker process of its own, into one record."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from .record import Record
from .telemetry import Telemetry
from .workers import WorkerError, started_ahead

Entry = dict[str, Any]


def measure_layers(
    script: str,
    cases: Sequence[Any],
    record: Record,
    telemetry: Telemetry,
    *,
    time_limit_s: float,
    least_s: float,
    ask: Callable[[dict[str, Any], float], tuple[dict[str, Any], float]],
    new_entry: Callable[[], Entry],
    keep: Callable[[Entry, dict[str, Any]], None],
) -> dict[str, Entry]:
    """The record's entries by case; it is saved with each part that a worker tells.

    Args:
        script: the file that is started with ``--worker``.
        time_limit_s: seconds for all layers, from now on.
        least_s: with less left, no further layer is begun.
        ask: a case and the seconds left -> the worker's request, and after how many seconds it
            counts as hanging.
        new_entry: what a case's entry begins with, besides ``case`` and ``failed``.
        keep: adds a part to an entry.
    """
    begin = time.monotonic()
    entries: dict[str, Entry] = record.results.setdefault("cases", {})
    failures: list[str] = record.results.setdefault("failures", [])
    by_id = {case.id: case for case in cases}
    for index, worker in enumerate(started_ahead(script, by_id)):
        left_s = time_limit_s - (time.monotonic() - begin)
        if left_s < least_s or left_s <= 0:
            failures.append(f"time limit: {len(cases) - index} layers not measured")
            print(failures[-1], file=sys.stderr)
            break
        described = dataclasses.asdict(by_id[worker.name])
        entry = entries[worker.name] = {"case": described, **new_entry(), "failed": []}
        request, limit_s = ask(described, left_s)
        try:
            for part in worker.run(request, time_limit_s=limit_s):
                keep(entry, part)
                record.save(telemetry=telemetry.summary())
        except WorkerError as error:
            print(error, file=sys.stderr)
            failures.append(str(error))
        for failed in entry["failed"]:
            print(f"{worker.name}: {failed['step']}: {failed['error']}", file=sys.stderr)
        entry["seconds"] = round(left_s - (time_limit_s - (time.monotonic() - begin)), 1)
        print(f"{worker.name}: {entry['seconds']} s", file=sys.stderr, flush=True)
        record.save(telemetry=telemetry.summary())
    return entries
