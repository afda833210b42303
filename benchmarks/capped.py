#!/usr/bin/env python
"""Layers at the board's power limit: what wins in bursts, what wins in the long run, who finds it.

Each layer in a fresh process:

picks       every mode chooses twice, on its own timer, from an idle GPU each time.
burst       two rounds of short batches (some 40 ms at most) after a pause each, in random then
            mirrored order, cold and hot operands: the clock is at its highest, the power limit not
            yet felt (a board looks every 50 to 100 ms).
sustained   the leading candidates, those of different engines first, alone for `--solo-s` each
            after a pause, in an order and then in its mirror image. The end of a block counts,
            brought to one power where the board's limit held the clock (NVML's instant power).

A mode's regret is its pick's time over the best one's, by each of the two truths.

    python benchmarks/capped.py --json capped.json --plot capped.png
"""

from __future__ import annotations

import argparse
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
    from common.layer_workers import measure_layers
    from common.record import Record
    from common.telemetry import Telemetry

    begin = time.monotonic()
    try:
        cases = wanted(options.layers, options.cases)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    arguments = {k: v for k, v in vars(options).items() if k != "worker"}
    chosen = ("device", "runs", "leaders", "bursts", "solo_s", "rest_s")

    def ask(case: dict[str, Any], left_s: float) -> tuple[dict[str, Any], float]:
        request = {"case": case, "modes": modes, "seconds": min(options.case_s, left_s)}
        # The plan is kept by the worker itself; the limit ends one that hangs.
        hanging_s = min(left_s, 3 * options.case_s + 30)
        return request | {k: arguments[k] for k in chosen}, hanging_s

    record = Record("capped", options.json, device=options.device, arguments=arguments)
    with Telemetry() as telemetry:
        entries = measure_layers(
            __file__,
            cases,
            record,
            telemetry,
            time_limit_s=options.time_limit - (time.monotonic() - begin),
            least_s=options.case_s / 2,  # it would be cut off, and its picks not judged
            ask=ask,
            new_entry=lambda: {"picks": {}, "solo": []},
            keep=lambda entry, part: keep(entry, part, telemetry),
        )
    complete = all(case.id in entries and "sustained" in entries[case.id] for case in cases)
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
