#!/usr/bin/env python
"""What is an engine worth on a new shape that won on a similar one? (docs/findings/neighbours.md)

Four changed shapes of each layer are tuned by `race` into a store: twice and half the batch, a
larger picture, a wider layer. Then the layer itself, which the store does not know, is served by
`neighbour`, by `heuristic` and by `race`. At last all that won takes turns on the layer.

    python benchmarks/neighbours.py --json neighbours.json
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from common import engines, investigation

CASES = (
    "resnet50_layer3_3x3/fprop/float16",
    "resnet50_layer1_3x3/dgrad/float16",
    "resnet50_layer4_3x3/wgrad/float16",
    "efficientnetv2_s_stage2_fused/fprop/float16",
    "convnext_t_down3/dgrad/float16",
    "sd_unet_down_640/fprop/float16",
    "yolov8l_c2f4_join/dgrad/float16",
    "vae_decoder_mid_512/wgrad/float16",
)
# Factors of the batch, of the picture's sides and of the channels.
CHANGES = {
    "batch*2": (2, 1, 1),
    "batch/2": (1 / 2, 1, 1),
    "size*8/7": (1, 8 / 7, 1),
    "channels*3/2": (1, 1, 3 / 2),
}
LEADERS = 6


def changed(problem: Any, batch: float, size: float, channels: float) -> Any:
    """``problem``, which has no groups, with other sizes."""
    n, c, *spatial = problem.input_shape
    k, _, *kernel = problem.weight_shape
    c, k = (round(width * channels / 8) * 8 if width >= 16 else width for width in (c, k))
    shape = (max(1, int(n * batch)), c, *(round(side * size) for side in spatial))
    return dataclasses.replace(problem, input_shape=shape, weight_shape=(k, c, *kernel))


def chosen(problem: Any, mode: str) -> Any:
    """The ``Choice`` of the mode, as by the first call of a layer."""
    import cudnn_autotune as ca
    from cudnn_autotune.timers.measuring import operands, run_operator

    ca.forget()
    run_operator(problem, operands(problem), mode)
    return next(c for c in ca.choices() if (c.problem, c.sampling) == (problem, mode))


def measure(case: Any) -> Iterator[investigation.Row]:
    import cudnn_autotune as ca

    problem = case.problem()
    with tempfile.TemporaryDirectory() as folder:
        ca.set_store(folder, mode="retune")  # no changed shape is served by another
        won = {
            name: chosen(changed(problem, *factors), "race").text
            for name, factors in CHANGES.items()
        }
        ca.set_store(folder, mode="read")
        won["neighbour"] = chosen(problem, "neighbour").text
        ca.set_store(mode="off")
    won["heuristic"] = chosen(problem, "heuristic").text
    race = chosen(problem, "race")
    won["race"] = race.text
    leaders = [text for text, _ in race.ranking[:LEADERS]]
    with engines.opened(problem) as (timer, candidates):
        known = {c.text: c for c in [*candidates.all(), *candidates.beyond()]}
        texts = dict.fromkeys([*won.values(), *leaders])
        running = timer.runnable([known[text] for text in texts if text in known])
        rough_ms = engines.single_calls(timer, running)
        running = [c for c in running if c.text in rough_ms]
        times_ms = engines.take_turns(timer, running, rough_ms, rounds=16)
    best_ms = min(times_ms.values())
    row: investigation.Row = {"best (ms)": best_ms}
    for name in ("neighbour", "heuristic", "race", *CHANGES):
        text = won[name]
        row[f"{name}: time over it"] = times_ms[text] / best_ms if text in times_ms else None
    yield row


if __name__ == "__main__":
    title = "What won on changed shapes, on the layer itself"
    sys.exit(investigation.run(__file__, __doc__, CASES, measure, title))
