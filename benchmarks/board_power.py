#!/usr/bin/env python
"""Short blocks at the board's power limit: how far off each one is, told by the power it drew.

The power controller hunts: blocks of 0.16 s of one engine alone differ by some percent. A reading
of instant power in a block says how far from the limit it ran. Each layer in a fresh process:

short       the leading candidates, those of different engines first, alone in turns, in random
            then mirrored order, hot operands; `--blocks` each of `--block-s`.
long        the same, `--long-blocks` each of `--long-s`: what is to be met.

A block's time is its last third's as measured; at the limit, that of the batches of each reading,
by `cudnn_autotune.sampling.board_power`, whose constants are from this record: the exponent is
fitted over all readings. SM clock by batch, instant power by NVML.

    python benchmarks/board_power.py --json board_power.json --plot board_power.png
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from common import arguments, ending
from common.cases import wanted

# Held at the limit of a 700 W board, at unlike clocks.
DEFAULT_CASES = (
    "yolov8l_c2f4_join/dgrad/float16",
    "sd_unet_down_320/fprop/float16",
    "resnet50_layer4_1x1/dgrad/float16",
)


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument(
        "--cases",
        default=",".join(DEFAULT_CASES),
        help="comma-separated parts of case ids (layer/op/dtype/layout); %(default)s",
    )
    p.add_argument("--layers", type=Path, default=Path(__file__).with_name("layers.json"))
    p.add_argument("--leaders", type=int, default=4, help="candidates that run alone, at most")
    p.add_argument("--blocks", type=int, default=6, help="short blocks of each candidate")
    p.add_argument("--block-s", type=float, default=0.16, help="length of a short block")
    p.add_argument("--long-blocks", type=int, default=2, help="long blocks of each candidate")
    p.add_argument("--long-s", type=float, default=0.7, help="length of a long block")
    p.add_argument("--time-limit", type=float, default=120, help="seconds for all layers")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def keep(entry: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds what a worker told to its case's entry."""
    kind = part.pop("part")
    if kind == "block":
        entry["blocks"].append(part)
    elif kind == "failed":
        entry["failed"].append(part)
    elif kind == "finished":
        entry["finished"] = True
    else:
        entry[kind] = part


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve
        from power_limit.measure import measure

        return serve(measure)
    for name, least in (("leaders", 1), ("blocks", 2), ("long_blocks", 1)):
        if getattr(options, name) < least:
            option = name.replace("_", "-")
            sys.exit(f"--{option} must be {least} or more, got {getattr(options, name)}")
    if not options.block_s > 0 or not options.long_s > 0:
        sys.exit("--block-s and --long-s must be above 0")

    from common.layer_workers import measure_layers
    from common.record import Record
    from common.telemetry import Telemetry
    from power_limit.report import plot, tables

    begin = time.monotonic()
    try:
        cases = wanted(options.layers, options.cases)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    arguments = {k: v for k, v in vars(options).items() if k != "worker"}
    chosen = ("device", "leaders", "blocks", "block_s", "long_blocks", "long_s")
    record = Record("board_power", options.json, device=options.device, arguments=arguments)
    # Few looks: the worker's own must not wait for them.
    with Telemetry(period_s=0.1) as telemetry:
        entries = measure_layers(
            __file__,
            cases,
            record,
            telemetry,
            time_limit_s=options.time_limit - (time.monotonic() - begin),
            least_s=0.0,
            ask=lambda case, left_s: ({"case": case, **{k: arguments[k] for k in chosen}}, left_s),
            new_entry=lambda: {"blocks": []},
            keep=keep,
        )
    complete = all(entries.get(case.id, {}).get("finished", False) for case in cases)
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
