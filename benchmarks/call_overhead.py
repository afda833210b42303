#!/usr/bin/env python
"""The host's side of a convolution: a call, a process's memory.

calls    nn.Conv2d with torch.backends.cudnn.benchmark = True against our Conv2d, and F.conv2d
         against our functional: one process, blocks in turns and in random order, the device
         synchronised between blocks and never inside. PyTorch's module takes part twice: how far
         its ratio to itself is from 1 is the error of the method.
memory   resident memory of a process that runs `--memory-shapes` shapes, forward and backward
         (ours also forward only)
         (three problems a shape), ours and PyTorch's each in a process of its own.

    python benchmarks/call_overhead.py --json overhead.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any

from common import arguments
from common.modes import OUR_MODES

PARTS = ("calls", "memory")
# The short ones first: what they leave of the time goes to the others.
MEMORY_OF = ("ours, forward only", "ours", "pytorch")
SETTINGS = ("no_grad", "forward", "forward_backward", "functional")
LAYOUTS = ("channels_last", "contiguous")
DTYPES = ("float16", "bfloat16", "float32", "float64")
_START_S = 10.0


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of: %(default)s")
    p.add_argument(
        "--shape", type=int, nargs=4, default=[1, 16, 8, 8], metavar=("N", "C", "H", "W")
    )
    p.add_argument("--filters", type=int, default=16)
    p.add_argument("--kernel", type=int, default=3, help="odd; the padding keeps the size")
    p.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--dtype", choices=DTYPES, default="float16")
    p.add_argument("--blocks", type=int, default=200)
    p.add_argument("--calls", type=int, default=100, help="calls in a block (backward: a quarter)")
    p.add_argument("--settings", default=",".join(SETTINGS), help="of: %(default)s")
    p.add_argument("--layouts", default=",".join(LAYOUTS), help="of: %(default)s")
    p.add_argument("--sampling", choices=OUR_MODES, default="sample_once")
    p.add_argument("--memory-shapes", type=int, default=1000)
    p.add_argument("--memory-step", type=int, default=50, help="shapes between two readings")
    p.add_argument("--memory-sampling", choices=OUR_MODES, default="sample_once")
    p.add_argument("--memory-benchmark-limit", type=int, default=4, help="ours and PyTorch's")
    p.add_argument("--time-limit", type=float, default=540, help="seconds for all parts")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve

        part = options.worker.partition(":")[0]
        return serve(importlib.import_module(f"overhead.{part}").measure)
    parts = arguments.some_of("--parts", options.parts, PARTS)
    settings = arguments.some_of("--settings", options.settings, SETTINGS)
    layouts = arguments.some_of("--layouts", options.layouts, LAYOUTS)

    from common.record import Record
    from common.tables import show
    from common.telemetry import Telemetry
    from common.workers import records_of, started_ahead
    from overhead.report import tables

    begin = time.monotonic()
    record = Record("call_overhead", options.json, device=options.device, arguments=vars(options))
    names = [part for part in PARTS if part in parts and part != "memory"]
    names += [f"memory:{name}" for name in MEMORY_OF] if "memory" in parts else []
    results: dict[str, Any] = record.results
    failures: list[str] = results.setdefault("failures", [])
    with Telemetry() as telemetry:
        # No worker is started ahead here: host time is what is measured.
        for index, worker in enumerate(started_ahead(__file__, names, ahead=0)):
            part, _, implementation = worker.name.partition(":")
            left = options.time_limit - (time.monotonic() - begin)
            request = {
                **{k: v for k, v in vars(options).items() if k != "json"},
                "settings": settings,
                "layouts": layouts,
                "implementation": implementation,
                # It ends by itself before it is ended: its CUDA context takes some seconds more.
                "seconds": max(1.0, left - _START_S) / (len(names) - index),
            }
            kept: list[dict[str, Any]] = []
            if part == "memory":
                results.setdefault("memory", {})[implementation] = kept
            else:
                results[part] = kept
            for entry in records_of(worker, request, max(1.0, left), failures):
                kept.append(entry)
                if "stopped" in entry:
                    failures.append(f"{worker.name}: {entry['stopped']}")
                record.save(telemetry=telemetry.summary())
    record.save(complete=not failures, telemetry=telemetry.summary())
    show(tables(record.data))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
