"""A simulated GPU on which problems of near sizes like the same engines: for dry runs only.

All of its engines are invented.
"""

from __future__ import annotations

import math
import random
from typing import Any

ENGINES = 10
# How much engines differ, of all problems of a kind alike, and from size to size.
_SPREAD, _WOBBLE = 0.2, 0.1
_LEAST_MS, _MOST_MS = 0.03, 0.4
_FLOPS_PER_MS = 4e11


def timer_of(problem: Any, seed: int) -> Any:
    from common.simulated import (
        SimulatedEngine,
        SimulatedGpu,
        SimulatedTimer,
    )

    from cudnn_autotune.engines.configs import Candidate

    kind = (problem.op, problem.weight_shape[2:], problem.stride, problem.dilation)
    flops = 2.0 * math.prod(problem.weight_shape[1:]) * math.prod(problem.output_shape)
    base_ms = min(_MOST_MS, max(_LEAST_MS, flops / _FLOPS_PER_MS))
    place = random.Random(repr(kind)).sample(range(ENGINES), ENGINES)
    engines = []
    for number in range(ENGINES):
        of_kind = random.Random(repr((kind, number))).uniform(0, _SPREAD)
        own = random.Random(repr((kind, problem.input_shape, problem.weight_shape, number)))
        time_ms = base_ms * (1 + of_kind) * (1 + own.uniform(0, _WOBBLE))
        mode = "A" if place[number] < ENGINES // 2 else "B"
        candidate = Candidate(number, {}, 0, (), (), f"eng{number}", mode, place[number])
        engines.append(SimulatedEngine(candidate, time_ms, 100.0))
    return SimulatedTimer(SimulatedGpu(), engines, seed)
