"""Shapes that a user of a layer meets besides it: other batches, picture sizes, widths."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

_LEAST_CHANNELS = 16
"""Fewer than this are colours or classes, which no width multiplier changes."""
_GRANULE = 8


@dataclass(frozen=True)
class Change:
    """By which factors the sizes of a layer differ."""

    batch: float = 1.0
    size: float = 1.0
    channels: float = 1.0


CHANGES = {
    "batch*2": Change(batch=2),
    "batch/2": Change(batch=1 / 2),
    "batch*4": Change(batch=4),
    "size*8/7": Change(size=8 / 7),  # 256 instead of 224
    "size*6/7": Change(size=6 / 7),  # 192
    "size*10/7": Change(size=10 / 7),  # 320
    "channels*3/2": Change(channels=3 / 2),  # a wider model of a family
    "channels*3/4": Change(channels=3 / 4),
    "channels*2": Change(channels=2),
}
DEFAULT = ("batch*2", "batch/2", "size*8/7", "channels*3/2")


def changed(problem: Any, change: Change) -> Any:
    """``problem`` with other sizes, rounded as networks do; None where that is no other problem, or
    none at all."""
    from cudnn_autotune import ConvProblem

    groups, channels, kernels = _channels(problem, change.channels)
    batch = max(1, math.floor(problem.input_shape[0] * change.batch))
    spatial = [s if s == 1 else round(s * change.size) for s in problem.input_shape[2:]]
    fields = {f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}
    fields |= {
        "input_shape": (batch, channels, *spatial),
        "weight_shape": (kernels, channels // groups, *problem.weight_shape[2:]),
        "groups": groups,
    }
    try:
        found = ConvProblem(**fields)
    except ValueError:  # the kernel no longer fits
        return None
    return None if found == problem else found


def _channels(problem: Any, factor: float) -> tuple[int, int, int]:
    """(groups, channels in, channels out)"""
    channels, kernels, groups = problem.input_shape[1], problem.weight_shape[0], problem.groups
    if groups == channels > 1:  # depthwise: as many groups as channels
        wide = _scaled(channels, factor)
        return wide, wide, kernels // channels * wide
    if groups > 1:  # groups become wider, not more
        widths = (max(1, round(n // groups * factor)) * groups for n in (channels, kernels))
        return (groups, *widths)
    return groups, _scaled(channels, factor), _scaled(kernels, factor)


def _scaled(channels: int, factor: float) -> int:
    if factor == 1 or channels < _LEAST_CHANNELS:
        return channels
    return max(_GRANULE, round(channels * factor / _GRANULE) * _GRANULE)


def sizes(problem: Any) -> tuple[int, ...]:
    """What neighbours may differ in: batch, channels in and out, spatial sizes."""
    x, w = problem.input_shape, problem.weight_shape
    return (x[0], x[1], w[0], *x[2:])


def distance(one: Any, other: Any) -> float:
    """As ``store.neighbours`` ranks them: the root of the sum of squares of log2 of the ratios."""
    pairs = zip(sizes(one), sizes(other), strict=True)
    return math.hypot(*(math.log2(a / b) for a, b in pairs))
