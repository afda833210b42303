"""Problems like a new one, among those that are remembered.

Alike are problems of one operation, dtype, layout and filter (kernel size, stride, dilation, kind
of grouping); the nearest is the one whose sizes differ by the least factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_text
from cudnn_autotune.store.entry import problem_of

# Beyond a factor of eight in one size, or less in several, a problem says little of another.
_MOST_DISTANCE = 3.0

# As problem_text writes it. Names in a file are not trusted: what has other sizes is no problem.
_SIZE = "[1-9][0-9]{0,18}"
_SIZES = f"{_SIZE}(?:x{_SIZE}){{2,4}}"
_PROBLEM = re.compile(
    rf"(?P<op>\S+) x=(?P<x>{_SIZES}) w=(?P<w>{_SIZES}) padding=\S+ "
    rf"(?P<filter>stride=\S+ dilation=\S+) groups=(?P<groups>{_SIZE}) (?P<types>.*)"
)
_Described = tuple[tuple[object, ...], tuple[int, ...]]


def nearest(problem: ConvProblem, keys: Iterable[str], most: int = 3) -> list[str]:
    """Keys of decisions for problems like ``problem``, the nearest first; not that of its own.

    The distance is the root of the sum of squares of log2 of the ratios of batch, channels in and
    out, and spatial sizes.

    Args:
        keys: of decisions (``Decision.key``); those that name no problem are passed over.
        most: how many at most.
    """
    own = _described(problem_text(problem))
    assert own is not None
    kind, sizes = own
    found: list[tuple[float, str]] = []
    for key in keys:
        if not key.startswith(problem.op):
            continue
        described = _described(problem_of(key))
        if described is None:
            continue
        other_kind, other = described
        if other_kind != kind or other == sizes:
            continue
        logs = [math.log2(a / b) for a, b in zip(sizes, other, strict=True)]
        distance = math.hypot(*logs)
        if distance <= _MOST_DISTANCE:
            found.append((distance, key))
    return [key for _, key in sorted(found)[:most]]


def _described(text: str) -> _Described | None:
    """What must be the same, and what may differ; None of a text that is no problem's."""
    match = _PROBLEM.fullmatch(text)
    if match is None:
        return None
    x, w = (tuple(map(int, match[name].split("x"))) for name in ("x", "w"))
    if len(x) != len(w):
        return None
    groups = int(match["groups"])
    # Of depthwise convolutions there are as many groups as channels.
    grouping = "depthwise" if groups == x[1] > 1 else groups
    kind = (match["op"], w[2:], match["filter"], grouping, match["types"])
    return kind, (x[0], x[1], w[0], *x[2:])
