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
from typing import Any

from common import layer_script
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
    p = layer_script.parser(__doc__, DEFAULT_CASES, time_limit_s=300)
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
    return p


def keep(entry: dict[str, Any], part: dict[str, Any], telemetry: Any) -> None:
    """Adds what a worker told to its case's entry."""
    if part["part"] == "pick":
        entry["picks"].setdefault(part["mode"], []).append(part["pick"])
        return
    if "begin_monotonic_s" in part:
        times = part.pop("begin_monotonic_s"), part.pop("end_monotonic_s")
        part["telemetry"] = telemetry.between(*times, at_most=50)
    layer_script.keep(entry, part, {"solo": "solo"})


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from capped_layers.measure import measure
        from common.workers import serve

        return serve(measure)
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        sys.exit(f"--modes: {unknown} unknown; allowed: {', '.join(MODES)}")
    layer_script.check_least(options, {"runs": 1, "leaders": 1, "bursts": 2})
    if not options.solo_s > 0 or options.rest_s < 0:
        sys.exit("--solo-s must be above 0, --rest-s 0 or more")

    from capped_layers import report

    chosen = ("device", "runs", "leaders", "bursts", "solo_s", "rest_s")

    def ask(case: dict[str, Any], left_s: float) -> tuple[dict[str, Any], float]:
        request = {"case": case, "modes": modes, "seconds": min(options.case_s, left_s)}
        # The plan is kept by the worker itself; the limit ends one that hangs.
        hanging_s = min(left_s, 3 * options.case_s + 30)
        return request | {name: getattr(options, name) for name in chosen}, hanging_s

    return layer_script.measured(
        __file__,
        options,
        report,
        ask=ask,
        new_entry=lambda: {"picks": {}, "solo": []},
        keep=keep,
        period_s=0.02,
        least_s=options.case_s / 2,  # it would be cut off, and its picks not judged
        last="sustained",
    )


if __name__ == "__main__":
    sys.exit(main())
