#!/usr/bin/env python
"""What a store on disk costs the host: opening it, lookups, puts; and writers at the same time.

stores     stores of 1,000 to 100,000 decisions: opened (their lines are indexed), asked for 200
           decisions that are there, again, and for 200 that are not; then some are put in
writers    processes that each add 500 decisions to one store, one by one: how long, and whether
           any is lost

Files lie in a temporary folder (`TMPDIR`). No GPU is used.

    python benchmarks/store.py --json store.json --plot store.png
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

DRY = {"entries": "20,200", "writers": "1,2", "decisions": 5, "repeat": 2}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--json", type=Path, help="write the record here, as it grows")
    p.add_argument("--plot", type=Path, help="draw the record here (.png, .svg)")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    p.add_argument("--entries", default="1000,10000,100000", help="decisions in a store")
    p.add_argument("--candidates", type=int, default=12, help="of each decision")
    p.add_argument("--repeat", type=int, default=5, help="openings and puts of each store")
    p.add_argument("--writers", default="1,2,8", help="processes at the same time")
    p.add_argument("--decisions", type=int, default=500, help="of each writer")
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

    from common import ending
    from common.record import Record
    from store_files import measure
    from store_files.report import plot, tables

    record = Record("store", options.json, device=options.device, arguments=vars(options))
    stores = record.results.setdefault("stores", [])
    writers = record.results.setdefault("writers", [])
    with tempfile.TemporaryDirectory() as folder:
        for count in entries:
            found = measure.sizes(Path(folder), count, options.candidates, options.repeat)
            stores.append(found)
            record.save()
            print(f"{count} decisions", file=sys.stderr, flush=True)
        for count in processes:
            writers.append(
                measure.writers(Path(folder), count, options.decisions, options.candidates)
            )
            record.save()
            print(f"{count} writers", file=sys.stderr, flush=True)
    record.save(complete=True)
    ending.show(record.data, tables, plot, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
