#!/usr/bin/env python
"""Which kernels (`KERNEL_CFG`) of the run-time-compiled engines are worth compiling beside the one
that cuDNN lists? (docs/findings/kernel-portfolio.md)

On each layer all kernels of such an engine are built and called, and the fastest take turns with
the fastest precompiled configs of heuristic modes A and B. `cudnn_autotune/engines/unlisted.py` has
the kernels that the package offers.

    python benchmarks/kernel_cfgs.py --json kernel_cfgs.json
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

from common import engines, investigation

# Which engine computes what: Hopper's, in cuDNN 9.
ENGINES = {"dgrad": 78, "wgrad": 70, "fprop": 71}
LAYERS = ("resnet50_layer3_3x3", "resnet50_layer1_1x1", "sd_unet_down_640", "resnet50_layer1_3x3")
CASES = tuple(f"{layer}/{op}/float16" for layer in LAYERS for op in ENGINES)
MOST_KERNELS = 56
KERNELS, CONTENDERS = 14, 4  # that take turns


def kernels(listed: Any) -> list[Any]:
    """Candidates: the listed config with each kernel that the engine may have."""
    from cudnn_autotune.engines.configs import engine_text

    found = []
    for value in range(MOST_KERNELS):
        knobs = {**listed.knobs, "KERNEL_CFG": value}
        text = engine_text(listed.engine, knobs)
        found.append(dataclasses.replace(listed, knobs=knobs, text=text))
    return found


def measure(case: Any) -> Iterator[investigation.Row]:
    with engines.opened(case.problem()) as (timer, candidates):
        engine = ENGINES[case.op]
        own = [c for c in candidates.all() if c.engine == engine and c.is_compiled]
        if not own:
            raise RuntimeError(f"engine {engine} is not listed")
        begin = time.perf_counter()
        built = timer.runnable(kernels(own[0]))
        build_s = time.perf_counter() - begin
        precompiled = [
            c
            for c in dict.fromkeys([*candidates.of_mode("B"), *candidates.of_mode("A")])
            if c.engine is not None and not c.is_compiled
        ]
        contenders = timer.runnable(precompiled)
        rough_ms = engines.single_calls(timer, [*built, *contenders])
        leaders = []
        for some, most in ((built, KERNELS), (contenders, CONTENDERS)):
            known = sorted((c for c in some if c.text in rough_ms), key=lambda c: rough_ms[c.text])
            leaders += known[:most]
        times_ms = engines.take_turns(timer, leaders, rough_ms)
        best_ms = min(times_ms[c.text] for c in contenders if c.text in times_ms)
        over = {c.text: times_ms[c.text] / best_ms for c in built if c.text in times_ms}
        first = sorted((c for c in built if c.text in over), key=lambda c: over[c.text])[:5]
        yield {
            "engine": engine,
            "built": len(built),
            "building (s)": build_s,
            "best precompiled (ms)": best_ms,
            "listed kernel, over it": over.get(own[0].text),
            "fastest kernels, over it": ", ".join(
                f"{c.knobs['KERNEL_CFG']}: {over[c.text]:.3f}" for c in first
            ),
        }


if __name__ == "__main__":
    title = "Kernels of engines that are compiled at run time, against precompiled configs"
    sys.exit(investigation.run(__file__, __doc__, CASES, measure, title))
