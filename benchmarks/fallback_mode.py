#!/usr/bin/env python
"""Which configs of cuDNN's heuristic mode FALLBACK are worth looking at, and what do they cost?

PyTorch's benchmark mode without a limit times them all. Most are hopeless: a launch of some takes
a second where the best takes a millisecond. On each layer what mode A lists and the first four of
mode B are called, as far as they need no compilation, then what mode FALLBACK lists; what comes
near the best takes turns with it. What does without tensor cores is only run on small layers.

    python benchmarks/fallback_mode.py --json fallback_mode.json --plot fallback_mode.png
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from common import arguments, ending
from common.cases import add_options, selected


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    add_options(p, "/")  # all
    p.add_argument("--gpus", type=int, default=1, help="that share the cases; %(default)s")
    p.add_argument("--rounds", type=int, default=8, help="a multiple of 4; %(default)s")
    p.add_argument("--time-limit", type=float, default=480, help="seconds for all, about")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve
        from fallback_configs.work import serve_cases

        return serve(serve_cases)
    if options.rounds < 4 or options.rounds % 4:
        sys.exit(f"--rounds must be a multiple of 4, got {options.rounds}")
    if options.gpus < 1:
        sys.exit(f"--gpus must be 1 or more, got {options.gpus}")
    if not options.time_limit > 0:
        sys.exit(f"--time-limit must be above 0, got {options.time_limit}")
    cases = [dataclasses.asdict(case) for case in selected(options)]

    import torch
    from common.record import Record
    from common.telemetry import Telemetry
    from fallback_configs.report import plot, tables
    from fallback_configs.work import measure_all

    if options.device == "cuda" and torch.cuda.device_count() < options.gpus:
        sys.exit(
            f"--gpus: {options.gpus} wanted, {torch.cuda.device_count()} here; "
            "--device cpu is a dry run"
        )
    begin = time.monotonic()
    given = {k: v for k, v in vars(options).items() if k != "worker"}
    record = Record("fallback_mode", options.json, device=options.device, arguments=given)
    measured: list[dict[str, Any]] = record.results.setdefault("measured", [])
    failures: list[str] = record.results.setdefault("failures", [])
    with Telemetry() as telemetry:

        def keep(found: dict[str, Any]) -> None:
            if "error" in found:
                failures.append(f"{found['case']}: {found['error']}")
                print(failures[-1], file=sys.stderr)
            else:
                measured.append(found)
            record.save(telemetry=telemetry.summary())

        request = {"device": options.device, "settings": {"rounds": options.rounds}}
        left_s = options.time_limit - (time.monotonic() - begin)
        failures += measure_all(Path(__file__), cases, options.gpus, request, left_s, keep)
    measured.sort(key=lambda found: str(found["case"]))
    if missing := len(cases) - len(measured):
        failures.append(f"{missing} of {len(cases)} not measured")
    record.save(complete=not missing, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if not missing else 1


if __name__ == "__main__":
    sys.exit(main())
