"""Which few kernels come near the best of all of them, over the layers that were recorded."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from common import numbers

from .measure import LISTED

Layer = dict[str, float]
"""Kernel -> its time over that of the best listed config of the layer; below 1 it is faster."""


def relative(entry: dict[str, Any]) -> Layer:
    """Of one measurement (``measure.measure``).

    A kernel that was not raced is known by single calls alone. All that were raced came before it
    there, so it counts as no faster than the slowest of the leaders.
    """
    best = min(entry["rivals"].values())
    raced: dict[str, float] = entry["kernels"]
    slowest = max(raced.values(), default=0.0)
    found = {name: max(ms, slowest) / best for name, ms in entry["rough"].items()}
    return found | {name: ms / best for name, ms in raced.items()}


def mean(layers: Sequence[Layer], chosen: Collection[str]) -> float:
    """Geometric mean over the layers of min(1, the best of the chosen): where none of them is
    faster, the listed config stays."""
    least = [min(1.0, *(layer.get(name, math.inf) for name in chosen), 1.0) for layer in layers]
    return numbers.geometric_mean(least)


def greedy(
    layers: Sequence[Layer], *, most: int = 8, least_gain: float = 0.001
) -> list[tuple[str, float]]:
    """(kernel, the mean with it and all before it), each the one that lowers the mean the most.

    Ends where the next would lower it by less than ``least_gain``. The listed config is not among
    them: it is offered anyway.
    """
    names = sorted({name for layer in layers for name in layer if name != LISTED}, key=int)
    chosen: list[tuple[str, float]] = []
    now = 1.0
    while len(chosen) < most:
        taken = [name for name, _ in chosen]
        left = {name: mean(layers, [*taken, name]) for name in names if name not in taken}
        if not left:
            break
        best = min(left, key=left.__getitem__)
        if left[best] > now * (1 - least_gain):
            break
        now = left[best]
        chosen.append((best, now))
    return chosen
