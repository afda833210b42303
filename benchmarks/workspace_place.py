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
from typing import Any

from common import layer_script

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
    p = layer_script.parser(__doc__, DEFAULT_CASES, time_limit_s=90)
    p.add_argument("--engines", type=int, default=4, help="candidates of a layer, at most")
    p.add_argument("--pages", type=int, default=8, help="pages of either half")
    p.add_argument("--rounds", type=int, default=5, help="batches of a candidate on each page")
    p.add_argument("--case-limit", type=float, default=30, help="seconds after which one hangs")
    return p


def main() -> int:
    options = parser().parse_args()
    if options.worker:
        from common.workers import serve
        from workspaces.measure import measure

        return serve(measure)
    layer_script.check_least(options, {"engines": 1, "pages": 1, "rounds": 1})

    from workspaces import report

    def ask(case: dict[str, Any], left_s: float) -> tuple[dict[str, Any], float]:
        asked = {name: getattr(options, name) for name in ("device", "engines", "pages", "rounds")}
        return {"case": case, **asked}, min(left_s, options.case_limit)

    return layer_script.measured(
        __file__,
        options,
        report,
        ask=ask,
        new_entry=lambda: {"engines": []},
        keep=lambda entry, part, _: layer_script.keep(entry, part, {"engine": "engines"}),
        period_s=0.05,
    )


if __name__ == "__main__":
    sys.exit(main())
