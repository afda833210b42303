#!/usr/bin/env python
"""What a store on disk costs the host: opening it, lookups, puts; and writers at the same time.

stores     stores of 1,000 to 100,000 decisions: opened (their lines are indexed), asked for 200
           decisions that are there, again, and for 200 that are not; then some are put in
writers    processes that each add 200 decisions to one store, one by one: how long, and whether
           any is lost

Files lie in a temporary folder (`TMPDIR`). No GPU is used; its readings are in the record as in
every other.

    python benchmarks/store.py --json store.json --plot store.png
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, ending

DRY = {"entries": "20,200", "writers": "1,2", "decisions": 5, "repeat": 2}


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--entries", default="1000,10000,100000", help="decisions in a store")
    p.add_argument("--candidates", type=int, default=12, help="of each decision")
    p.add_argument("--repeat", type=int, default=5, help="openings and puts of each store")
    p.add_argument("--writers", default="1,2,8", help="processes at the same time")
    p.add_argument("--decisions", type=int, default=200, help="of each writer")
    p.add_argument("--time-limit", type=float, default=300, help="seconds for all")
    return p


def counts(option: str, text: str) -> list[int]:
    values = [int(part) if part.strip().isdecimal() else 0 for part in str(text).split(",")]
    if min(values) < 1:
        sys.exit(f"{option} must be whole numbers of 1 or more, got {text!r}")
    return values


def main() -> int:
    p = parser()
    options = p.parse_args()
    if options.device == "cpu":
        p.set_defaults(**DRY)
        options = p.parse_args()
    entries = counts("--entries", options.entries)
    processes = counts("--writers", options.writers)
    for name in ("candidates", "repeat", "decisions"):
        counts(f"--{name}", getattr(options, name))

    from common.record import Record
    from common.telemetry import Telemetry
    from store_files import measure
    from store_files.report import plot, tables

    begin = time.monotonic()
    record = Record("store", options.json, device=options.device, arguments=vars(options))
    results = record.results
    failures: list[str] = results.setdefault("failures", [])
    todo = [("stores", count) for count in entries] + [("writers", count) for count in processes]
    with tempfile.TemporaryDirectory() as folder, Telemetry(period_s=0.1) as telemetry:
        for index, (part, count) in enumerate(todo):
            left = options.time_limit - (time.monotonic() - begin)
            if left <= 0:
                rest = ", ".join(f"{count} {part}" for part, count in todo[index:])
                failures.append(f"time limit: not run: {rest}")
                break
            sizes = Path(folder), count
            try:
                found: dict[str, Any] = (
                    measure.sizes(*sizes, options.candidates, options.repeat)
                    if part == "stores"
                    else measure.writers(*sizes, options.decisions, options.candidates, left)
                )
            except RuntimeError as error:
                print(error, file=sys.stderr)
                failures.append(str(error))
                continue
            results.setdefault(part, []).append(found)
            record.save(telemetry=telemetry.summary())
            took = time.monotonic() - begin
            print(f"{part} of {count}: {took:.0f} s", file=sys.stderr, flush=True)
    record.save(complete=not failures, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
