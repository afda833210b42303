"""The search for remembered problems that are similar to a new one.

Two problems are similar if they have the same operation, dtype, layout and filter (kernel size,
stride, dilation and kind of grouping). The nearest is the one whose sizes differ by the smallest
factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_text
from cudnn_autotune.store.entry import problem_of

# Problems further apart say little about each other. The distance is in powers of two: 3 stands for
# a factor of eight in one size, or smaller factors in several sizes.
_MOST_DISTANCE = 3.0

# This matches what problem_text writes. The names in a file are not trusted, so sizes are bounded.
_SIZE = "[1-9][0-9]{0,18}"
_SIZES = f"{_SIZE}(?:x{_SIZE}){{2,4}}"
_PROBLEM = re.compile(
    rf"(?P<op>\S+) x=(?P<x>{_SIZES}) w=(?P<w>{_SIZES}) padding=\S+ "
    rf"(?P<filter>stride=\S+ dilation=\S+) groups=(?P<groups>{_SIZE}) (?P<types>.*)"
)
_Described = tuple[tuple[object, ...], tuple[int, ...]]


def nearest(problem: ConvProblem, keys: Iterable[str], most: int = 3) -> list[str]:
    """Returns up to ``most`` keys of decisions for problems similar to ``problem``, the nearest
    first, and none of ``problem`` itself. A key that names no problem is skipped.

    The distance is the Euclidean norm of the base-2 logarithms of the ratios of batch size, input
    channels, output channels and spatial sizes.
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
    """Returns what similar problems share, and the sizes that may differ; None if ``text`` does not
    describe a problem."""
    match = _PROBLEM.fullmatch(text)
    if match is None:
        return None
    x, w = (tuple(map(int, match[name].split("x"))) for name in ("x", "w"))
    if len(x) != len(w):
        return None
    groups = int(match["groups"])
    # A depthwise convolution has as many groups as channels, whatever their number.
    grouping = "depthwise" if groups == x[1] > 1 else groups
    kind = (match["op"], w[2:], match["filter"], grouping, match["types"])
    return kind, (x[0], x[1], w[0], *x[2:])
