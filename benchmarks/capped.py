#!/usr/bin/env python
"""Layers at the board's power limit: what wins in bursts, what wins in the long run, who finds it.

Each layer in a fresh process:

picks       every mode chooses twice, on its own timer, from an idle GPU each time.
burst       two rounds of short batches (some 40 ms at most) after a pause each, in random then
            mirrored order, cold and hot operands: the clock is at its highest, the power limit not
            yet felt (a board looks every 50 to 100 ms).
sustained   the leading candidates, those of different engines first, alone for `--solo-s` each
            after a pause, in an order and then in its mirror image; the second half of a block
            counts. SM clock by batch, board power by NVML.

A mode's regret is its pick's time over the best one's, by each of the two truths.

    python benchmarks/capped.py --json capped.json --plot capped.png
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from common import arguments, ending
from common.cases import wanted
from common.sources import MODES

# Heavy enough for a 700 W board: the fastest in bursts need not be the fastest in the long run.
DEFAULT_CASES = (
    "vae_decoder_shortcut/dgrad/float16",
    "resnet50_layer4_1x1/dgrad/float16",
    "sd_unet_down_1280/wgrad/float16",
    "vgg16_conv4_2/dgrad/float16",
    "yolov8l_c2f4_join/dgrad/float16",
)


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument(
        "--cases",
        default=",".join(DEFAULT_CASES),
        help="comma-separated parts of case ids (layer/op/dtype/layout); %(default)s",
    )
    p.add_argument("--layers", type=Path, default=Path(__file__).with_name("layers.json"))
    p.add_argument("--modes", default=",".join(MODES[1:]), help="of: " + ",".join(MODES))
    p.add_argument("--runs", type=int, default=2, help="choices of each mode")
    p.add_argument("--leaders", type=int, default=6, help="candidates that run alone, at most")
    p.add_argument("--solo-s", type=float, default=0.7, help="length of a solo block")
    p.add_argument("--rest-s", type=float, default=0.2, help="pause before a burst and a block")
    p.add_argument("--bursts", type=int, default=8, help="of two rounds each")
    p.add_argument(
        "--case-s",
        type=float,
        default=30,
        help="wall seconds for one layer, about: more leaders "
        "run alone the more time the modes leave",
    )
    p.add_argument("--time-limit", type=float, default=300, help="seconds for all layers")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def keep(entry: dict[str, Any], part: dict[str, Any], telemetry: Any) -> None:
    """Adds what a worker told to its case's entry."""
    kind = part.pop("part")
    if kind == "pick":
        entry["picks"].setdefault(part["mode"], []).append(part["pick"])
    elif kind == "solo":
        if "begin_monotonic_s" in part:
            times = part.pop("begin_monotonic_s"), part.pop("end_monotonic_s")
            part["telemetry"] = telemetry.between(*times, at_most=50)
        entry["solo"].append(part)
    elif kind == "failed":
        entry["failed"].append(part)
    else:
        entry[kind] = part


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from capped_layers.measure import measure
        from common.workers import serve

        return serve(measure)
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        sys.exit(f"--modes: {unknown} unknown; allowed: {', '.join(MODES)}")
    for name, least in (("runs", 1), ("leaders", 1), ("bursts", 2)):
        if getattr(options, name) < least:
            sys.exit(f"--{name} must be {least} or more, got {getattr(options, name)}")
    if not options.solo_s > 0 or options.rest_s < 0:
        sys.exit("--solo-s must be above 0, --rest-s 0 or more")

    from capped_layers.report import plot, tables
    from common.record import Record
    from common.telemetry import Telemetry
    from common.workers import WorkerError, started_ahead

    begin = time.monotonic()
    try:
        cases = wanted(options.layers, options.cases)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    arguments = {k: v for k, v in vars(options).items() if k != "worker"}
    record = Record("capped", options.json, device=options.device, arguments=arguments)
    entries = record.results["cases"] = {}
    failures = record.results["failures"] = []
    by_id = {case.id: case for case in cases}
    with Telemetry() as telemetry:
        for index, worker in enumerate(started_ahead(__file__, by_id)):
            left = options.time_limit - (time.monotonic() - begin)
            if left < options.case_s / 2:  # it would be cut off, and its picks not judged
                failures.append(f"time limit: {len(cases) - index} layers not measured")
                print(failures[-1], file=sys.stderr)
                break
            described = dataclasses.asdict(by_id[worker.name])
            entry: dict[str, Any] = {"case": described, "picks": {}, "solo": [], "failed": []}
            entries[worker.name] = entry
            request = {
                "case": described,
                "modes": modes,
                "seconds": min(options.case_s, left),
                **{k: arguments[k] for k in ("device", "runs", "leaders", "bursts")},
                **{k: arguments[k] for k in ("solo_s", "rest_s")},
            }
            try:
                # The plan is kept by the worker itself; this ends one that hangs.
                for part in worker.run(request, time_limit_s=min(left, 3 * options.case_s + 30)):
                    keep(entry, part, telemetry)
                    record.save(telemetry=telemetry.summary())
            except WorkerError as error:
                print(error, file=sys.stderr)
                failures.append(str(error))
            for failed in entry["failed"]:
                print(f"{worker.name}: {failed['step']}: {failed['error']}", file=sys.stderr)
            entry["seconds"] = round(left - (options.time_limit - (time.monotonic() - begin)), 1)
            print(f"{worker.name}: {entry['seconds']} s", file=sys.stderr, flush=True)
            record.save(telemetry=telemetry.summary())
    complete = all(case.id in entries and "sustained" in entries[case.id] for case in cases)
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
