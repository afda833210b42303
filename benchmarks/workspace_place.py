#!/usr/bin/env python
"""Does it matter where a small workspace lies? The same engine on pages near and far.

The L2 cache of a large GPU has two partitions, each of which serves half of all 4 KiB pages. Which
half a page is in, one multiprocessor tells by the cycles that an atomic addition takes it
(`csrc/core/page_distance.h`, which says why that should matter). Each layer in a fresh process:

pages       cycles to each page of a block.
engines     the leading candidates that need a workspace of a page or less, on pages of either
            half in turns, in random order: `--rounds` batches on each page, hot operands.

    python benchmarks/workspace_place.py --json workspace_place.json --plot workspace_place.png
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from common import arguments, ending
from common.cases import wanted

DEFAULT_CASES = (
    "sd_unet_up_960/fprop/float16",
    "sd_unet_up_960/fprop/bfloat16",
    "inceptionv3_1x7/fprop/float16",
    "sd_unet_down_320_stride2/fprop/float16",
    "resnet50_layer3_3x3/fprop/float16",
    "resnet50_layer3_3x3/dgrad/float16",
    "resnext50_layer2_group_stride2/fprop/float16",
    "resnet50_layer2_down/dgrad/bfloat16",
    "resnet50_layer1_3x3/dgrad/float16",
    "vgg16_conv4_2/fprop/float16",
)


def parser() -> argparse.ArgumentParser:
    p = arguments.parser(__doc__)
    p.add_argument(
        "--cases",
        default=",".join(DEFAULT_CASES),
        help="comma-separated parts of case ids (layer/op/dtype/layout); %(default)s",
    )
    p.add_argument("--layers", type=Path, default=Path(__file__).with_name("layers.json"))
    p.add_argument("--engines", type=int, default=4, help="candidates of a layer, at most")
    p.add_argument("--pages", type=int, default=8, help="pages of either half")
    p.add_argument("--rounds", type=int, default=5, help="batches of a candidate on each page")
    p.add_argument("--case-limit", type=float, default=30, help="seconds after which one hangs")
    p.add_argument("--time-limit", type=float, default=90, help="seconds for all layers")
    p.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return p


def keep(entry: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds what a worker told to its case's entry."""
    kind = part.pop("part")
    if kind == "engine":
        entry["engines"].append(part)
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
        from workspaces.measure import measure

        return serve(measure)
    for name in ("engines", "pages", "rounds"):
        if getattr(options, name) < 1:
            sys.exit(f"--{name} must be 1 or more, got {getattr(options, name)}")

    from common.layer_workers import measure_layers
    from common.record import Record
    from common.telemetry import Telemetry
    from workspaces.report import plot, tables

    begin = time.monotonic()
    try:
        cases = wanted(options.layers, options.cases)
    except ValueError as error:
        sys.exit(f"--layers: {error}")
    arguments = {k: v for k, v in vars(options).items() if k != "worker"}
    chosen = ("device", "engines", "pages", "rounds")
    record = Record("workspace_place", options.json, device=options.device, arguments=arguments)
    with Telemetry(period_s=0.05) as telemetry:
        entries = measure_layers(
            __file__,
            cases,
            record,
            telemetry,
            time_limit_s=options.time_limit - (time.monotonic() - begin),
            least_s=0.0,
            ask=lambda case, left_s: (
                {"case": case, **{k: arguments[k] for k in chosen}},
                min(left_s, options.case_limit),
            ),
            new_entry=lambda: {"engines": []},
            keep=keep,
        )
    complete = all(entries.get(case.id, {}).get("finished", False) for case in cases)
    record.save(complete=complete, telemetry=telemetry.summary())
    ending.show(record.data, tables, plot, options.plot)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
