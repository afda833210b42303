#!/usr/bin/env python
"""Short blocks at the board's power limit: how far off each one is, told by the power it drew.

The power controller hunts: blocks of 0.16 s of one engine alone differ by some percent. A reading
of instant power in a block says how far from the limit it ran. Each layer in a fresh process:

short       the leading candidates, those of different engines first, alone in turns, in random
            then mirrored order, hot operands; `--blocks` each of `--block-s`.
long        the same, `--long-blocks` each of `--long-s`: what is to be met.

A block's time is its last third's as measured; at the limit, that of the batches of each reading,
by `cudnn_autotune.timers.board_power`, whose constants are from this record: the exponent is
fitted over all readings. SM clock by batch, instant power by NVML.

    python benchmarks/board_power.py --json board_power.json --plot board_power.png
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from common import layer_script

# Held at the limit of a 700 W board, at unlike clocks.
DEFAULT_CASES = (
    "yolov8l_c2f4_join/dgrad/float16",
    "sd_unet_down_320/fprop/float16",
    "resnet50_layer4_1x1/dgrad/float16",
)


def parser() -> argparse.ArgumentParser:
    p = layer_script.parser(__doc__, DEFAULT_CASES, time_limit_s=120)
    p.add_argument("--leaders", type=int, default=4, help="candidates that run alone, at most")
    p.add_argument("--blocks", type=int, default=6, help="short blocks of each candidate")
    p.add_argument("--block-s", type=float, default=0.16, help="length of a short block")
    p.add_argument("--long-blocks", type=int, default=2, help="long blocks of each candidate")
    p.add_argument("--long-s", type=float, default=0.7, help="length of a long block")
    return p


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve
        from power_limit.measure import measure

        return serve(measure)
    layer_script.check_least(options, {"leaders": 1, "blocks": 2, "long_blocks": 1})
    if not options.block_s > 0 or not options.long_s > 0:
        sys.exit("--block-s and --long-s must be above 0")

    from power_limit import report

    chosen = ("device", "leaders", "blocks", "block_s", "long_blocks", "long_s")

    def ask(case: dict[str, Any], left_s: float) -> tuple[dict[str, Any], float]:
        return {"case": case, **{name: getattr(options, name) for name in chosen}}, left_s

    return layer_script.measured(
        __file__,
        options,
        report,
        ask=ask,
        new_entry=lambda: {"blocks": []},
        keep=lambda entry, part, _: layer_script.keep(entry, part, {"block": "blocks"}),
        period_s=0.1,  # few looks: the worker's own must not wait for them
    )


if __name__ == "__main__":
    sys.exit(main())
