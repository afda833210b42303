#!/usr/bin/env python
"""What a store on disk costs the host: its size, opening it and one lookup, an addition, an import.

stores     stores of 1,000 and 10,000 decisions: opened by a process, which looks one of them up;
           decisions are added one by one; `cudnn-autotune import` takes all into an empty store
writers    processes that each add 50 decisions to the largest of them, one by one, at the same
           time: how long each addition takes, and whether any is lost

Files lie in a temporary folder (`TMPDIR`). No GPU is used; its readings are in the record as in
every other.

    python benchmarks/store.py --json store.json
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments

DRY = {"entries": "20,200", "writers": "1,2", "decisions": 5, "repeat": 2}


def main() -> int:
    p = arguments.parser(__doc__)
    p.add_argument("--entries", type=arguments.counts, default="1000,10000", help="decisions")
    p.add_argument("--candidates", type=int, default=40, help="timed for each decision")
    p.add_argument("--repeat", type=int, default=20, help="openings and additions of each store")
    p.add_argument("--writers", type=arguments.counts, default="1,8", help="processes at a time")
    p.add_argument("--decisions", type=int, default=50, help="of each writer")
    p.add_argument("--time-limit", type=float, default=300, help="seconds for all")
    options = p.parse_args()
    if options.device == "cpu":
        p.set_defaults(**DRY)
        options = p.parse_args()
    arguments.check_least(options, candidates=1, repeat=1, decisions=1)

    from common.record import Record
    from common.tables import show
    from common.telemetry import Telemetry
    from store_files import measure
    from store_files.report import tables

    begin = time.monotonic()
    record = Record("store", options.json, device=options.device, arguments=vars(options))
    failures: list[str] = record.results.setdefault("failures", [])
    todo = [(part, n) for part in ("entries", "writers") for n in getattr(options, part)]
    with tempfile.TemporaryDirectory() as folder, Telemetry(period_s=0.1) as telemetry:
        path = Path(folder, "store.json")
        for part, count in todo:
            left = options.time_limit - (time.monotonic() - begin)
            if left <= 0:
                failures.append(f"time limit: not run: {count} {part}")
                continue
            try:
                found: dict[str, Any] = (
                    measure.store(path, count, options.candidates, options.repeat)
                    if part == "entries"
                    else measure.writers(path, count, options.decisions, options.candidates, left)
                )
            except RuntimeError as error:
                failures.append(str(error))
                continue
            found["load"] = os.getloadavg()[0]
            record.results.setdefault(part, []).append(found)
            record.save(telemetry=telemetry.summary())
    record.save(complete=not failures, telemetry=telemetry.summary())
    show(tables(record.data))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
