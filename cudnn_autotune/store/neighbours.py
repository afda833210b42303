"""Problems like a new one, among those that are remembered.

Alike are problems of one operation, dtype, layout and filter (kernel size, stride, dilation, kind
of grouping); the nearest is the one whose sizes differ by the least factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from cudnn_autotune.problem import ConvProblem
from cudnn_autotune.store.decision import key_of

# Beyond a factor of eight in one size, or less in several, a problem says little of another.
_MOST_DISTANCE = 3.0

_KEY = re.compile(
    r"(?P<op>\S+) x=(?P<x>\S+) w=(?P<w>\S+) padding=\S+ (?P<filter>stride=\S+ dilation=\S+) "
    r"groups=(?P<groups>\d+) (?P<types>.*?) benchmark_limit=\d+ sampling=(?P<sampling>.*)"
)
_Described = tuple[tuple[object, ...], tuple[int, ...]]


def nearest(
    problem: ConvProblem, keys: Iterable[str], sampling: str | None = None, most: int = 3
) -> list[str]:
    """Keys of decisions for problems like ``problem``, the nearest first; not that of its own.

    The distance is the root of the sum of squares of log2 of the ratios of batch, channels in and
    out, and spatial sizes.

    Args:
        keys: of decisions (``Decision.key``).
        sampling: only those of this mode; None: of any.
        most: how many at most.
    """
    own = _KEY.fullmatch(key_of(problem, sampling or "any"))
    assert own is not None
    kind, sizes = _described(own)
    found: list[tuple[float, str]] = []
    for key in keys:
        if not key.startswith(problem.op):
            continue
        match = _KEY.fullmatch(key)
        if match is None or (sampling is not None and match["sampling"] != sampling):
            continue
        other_kind, other = _described(match)
        if other_kind != kind or other == sizes:
            continue
        logs = [math.log2(a / b) for a, b in zip(sizes, other, strict=True)]
        distance = math.hypot(*logs)
        if distance <= _MOST_DISTANCE:
            found.append((distance, key))
    return [key for _, key in sorted(found)[:most]]


def _described(match: re.Match[str]) -> _Described:
    """What must be the same, and what may differ."""
    x, w = (tuple(map(int, match[name].split("x"))) for name in ("x", "w"))
    groups = int(match["groups"])
    # Of depthwise convolutions there are as many groups as channels.
    grouping = "depthwise" if groups == x[1] > 1 else groups
    kind = (match["op"], w[2:], match["filter"], grouping, match["types"])
    return kind, (x[0], x[1], w[0], *x[2:])
