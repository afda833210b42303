#!/usr/bin/env python
"""Does it matter on which page a small workspace lies? (docs/findings/workspace-pages.md)

The cycles that an atomic addition takes one multiprocessor tell which of 128 pages are near to it,
and which are far (`csrc/core/page_distance.h`). The leading engines whose workspace fits into a
page run with it on eight pages of either kind, in random order, five batches on each.

    python benchmarks/workspace_place.py --json workspace_place.json
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from common import engines, investigation

CASES = (
    "sd_unet_up_960/fprop/float16",
    "sd_unet_up_960/fprop/bfloat16",
    "inceptionv3_1x7/fprop/float16",
    "sd_unet_down_320_stride2/fprop/float16",
    "resnet50_layer3_3x3/fprop/float16",
    "resnext50_layer2_group_stride2/fprop/float16",
)
PAGE_BYTES, BLOCK_PAGES = 4096, 128
ENGINES, PAGES, ROUNDS = 4, 8, 5
BATCH_MS, GRAPH_BELOW_MS = 1.5, 0.05


def measure(case: Any) -> Iterator[investigation.Row]:
    import torch

    from cudnn_autotune import _C
    from cudnn_autotune.timers.measuring import operands

    block = torch.zeros((BLOCK_PAGES + 1) * PAGE_BYTES, dtype=torch.uint8, device="cuda:0")
    pages = block[-block.data_ptr() % PAGE_BYTES :][: BLOCK_PAGES * PAGE_BYTES]
    cycles = _C.page_cycles(pages)
    far = _C.far_pages(cycles)
    if not far:
        raise RuntimeError("the pages are not of two kinds")
    near = [page for page in range(BLOCK_PAGES) if page not in far]
    with engines.opened(case.problem()) as (timer, candidates):
        known = engines.ranked(timer, candidates)
        plans = {c: timer.plans.get(c.text) for c in known}
        chosen = [c for c in known if plans[c] and 0 < plans[c].workspace_bytes <= PAGE_BYTES]
        native = _C.PlanTimer(
            case.problem().native(), [operands(case.problem(), "cuda:0")], 0, workspace_pages=False
        )
        for candidate in chosen[:ENGINES]:
            number = native.add(plans[candidate])
            calls = max(2, min(200, round(BATCH_MS / known[candidate])))
            batch = (number, calls, False, known[candidate] < GRAPH_BELOW_MS)
            times: dict[int, list[float]] = {}
            for _ in range(ROUNDS):
                for page in random.sample([*near[:PAGES], *far[:PAGES]], 2 * PAGES):
                    native.set_workspace(pages[page * PAGE_BYTES :][:PAGE_BYTES])
                    time_ms, clock_mhz, _, error = native.run([batch, batch], 2)[-1]
                    if error:
                        raise RuntimeError(f"{candidate.text}: {error}")
                    # In thousands of cycles, where the clock is known: it moves between batches.
                    times.setdefault(page, []).append(time_ms * (clock_mhz or 1.0))
            medians = {page: statistics.median(found) for page, found in times.items()}
            on_near, on_far = (
                statistics.median(medians[page] for page in half[:PAGES]) for half in (near, far)
            )
            yield {
                "engine": candidate.text,
                "workspace (B)": plans[candidate].workspace_bytes,
                "in bursts (us)": 1e3 * known[candidate],
                "near over far": on_near / on_far,
                "near: cycles": statistics.median(cycles[page] for page in near),
                "far: cycles": statistics.median(cycles[page] for page in far),
            }


if __name__ == "__main__":
    title = "The same engine with its workspace on near and on far pages"
    sys.exit(investigation.run(__file__, __doc__, CASES, measure, title))
