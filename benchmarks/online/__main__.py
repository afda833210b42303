#!/usr/bin/env python
"""The cost of `online` while it is undecided, its duration, and its decisions.

`warm_start --modes heuristic,online` has what the first call costs.

convergence   calls and seconds until each layer is decided (a loop that waits for the GPU every 16
              calls); then its pick, `race`'s and the contenders of both side by side.
overhead      host time of a call of a tiny convolution while its trial is undecided, against
              `heuristic`'s decided call: one process, blocks in turns. A trial lasts some hundred
              calls, so it is forgotten and started again; its first calls, each of which builds
              and checks a candidate as well, are timed one by one and shown apart. The mean is
              shown beside the median: what the tuner's thread computes hits few calls. And the CPU
              time of that thread, a turn.

    python benchmarks/online --json online.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this folder's parts, and `common`

from common import arguments, cases
from common.record import Record

from online.problems import CONVERGENCE

# What each may take of the time that is left.
PARTS = {"convergence": 0.7, "overhead": 1.0}


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__, has_dry_run=False)
    p.add_argument("--parts", default=",".join(PARTS), help="of: %(default)s")
    cases.add_options(p, CONVERGENCE)
    p.add_argument("--trials", type=int, default=20, help="for overhead, at most")
    p.add_argument("--calls", type=int, default=25, help="in a block of overhead")
    p.add_argument("--time-limit", type=float, default=60, help="seconds for all parts")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Case id -> its description: of each text the first case, in a fixed random order, so that
    what a time limit cuts off is no choice."""
    found = [cases.wanted(options.layers, part)[0] for part in options.cases.split(",")]
    random.Random(0).shuffle(found)
    return {case.id: dataclasses.asdict(case) for case in found}


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve

        module = importlib.import_module(f"online.{options.worker}")
        return serve(module.measure)
    parts = arguments.some_of("--parts", options.parts, PARTS)
    arguments.check_least(options, trials=1, calls=1)
    described_cases = described(options)
    arguments.check_gpu(__file__)

    from common.workers import records_of, start

    from cudnn_autotune.tools.processes import started_ahead
    from online import overhead
    from online.report import tables

    begin = time.monotonic()
    record = Record("online", options)
    failures, decided = record.list_of("failures"), record.list_of("convergence")
    trials: list[dict[str, Any]] = []
    names = [part for part in PARTS if part in parts]
    # All at once: a process takes seconds to import torch, and none may do so beside `overhead`.
    with record:
        for worker in started_ahead(names, partial(start, __file__), len(names)):
            left = options.time_limit - (time.monotonic() - begin)
            if left < 1:
                failures.append(f"time limit: {worker.name} was not measured")
                continue
            request = {
                "cases": described_cases,
                "seconds": left * PARTS[worker.name],
                "trials": options.trials,
                "calls": options.calls,
            }
            for entry in records_of(worker, request, max(left, 5), failures):
                if worker.name == "convergence":
                    decided.append(entry)
                else:
                    trials.append(entry)
                    compared = overhead.compared(trials)
                    record.results["overhead"] = {"compared": compared, "trials": len(trials)}
                record.save()
    wanted = len(described_cases) if "convergence" in parts else 0
    return record.end(not failures and len(decided) == wanted, tables)


if __name__ == "__main__":
    sys.exit(main())
