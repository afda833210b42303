"""The search for remembered problems that are similar to a new one.

Two problems are similar if they have the same operation, dtype, layout and filter (kernel size,
stride, dilation and kind of grouping). The nearest is the one whose sizes differ by the smallest
factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

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
_MOST_IN_LEAF = 16
# Equal distances that were computed in another order differ by less.
_DIGITS = 9

_Described = tuple[tuple[object, ...], tuple[float, ...]]
_Point = tuple[tuple[float, ...], str]


class Neighbours:
    """An index of the keys of decisions, in which the nearest are found without looking at all.

    What is added is sorted when it is first looked for: problems of other kinds cost little.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._waiting: dict[tuple[str, ...], list[str]] = {}
        self._trees: dict[tuple[object, ...], _Tree] = {}

    def add(self, keys: Iterable[str]) -> None:
        """Adds keys; those that are there already are passed over."""
        for key in keys:
            if key not in self._keys:
                self._keys.add(key)
                self._waiting.setdefault(_rough_kind(problem_of(key)), []).append(key)

    def nearest(
        self, problem: ConvProblem, most: int, is_there: Callable[[str], bool]
    ) -> list[tuple[float, str]]:
        """Returns up to ``most`` keys of problems similar to ``problem`` with their distances, the
        nearest first, and none of ``problem`` itself.

        The distance is the Euclidean norm of the base-2 logarithms of the ratios of batch size,
        input channels, output channels and spatial sizes.

        Args:
            is_there: Returns whether a key that was added is to be found still.
        """
        text = problem_text(problem)
        for key in self._waiting.pop(_rough_kind(text), ()):
            described = _described(problem_of(key))
            if described is not None:
                kind, place = described
                self._trees.setdefault(kind, _Tree()).add((place, key))
        own = _described(text)
        assert own is not None
        kind, place = own
        if kind not in self._trees:
            return []
        search = _Search(place, most, is_there)
        search.visit(self._trees[kind], [0.0] * len(place), 0.0)
        return search.found


class _Tree:
    """A k-d tree of points, whose leaves are divided when they are first looked into."""

    __slots__ = ("axis", "children", "points", "value")

    def __init__(self, points: list[_Point] | None = None) -> None:
        self.points = [] if points is None else points
        self.children: tuple[_Tree, _Tree] | None = None
        self.axis = 0
        self.value = 0.0

    def add(self, point: _Point) -> None:
        node = self
        while node.children is not None:
            node = node.children[point[0][node.axis] >= node.value]
        node.points.append(point)

    def divide(self) -> None:
        """Divides a large leaf where its points are spread most, unless all are at one place."""
        if self.children is not None or len(self.points) <= _MOST_IN_LEAF:
            return
        axes = list(zip(*(place for place, _ in self.points), strict=True))
        spreads = [max(values) - min(values) for values in axes]
        if not any(spreads):
            return
        self.axis = axis = spreads.index(max(spreads))
        values = sorted(axes[axis])
        middle = values[len(values) // 2]
        self.value = middle if middle > values[0] else next(v for v in values if v > middle)
        sides: tuple[list[_Point], list[_Point]] = ([], [])
        for point in self.points:
            sides[point[0][axis] >= self.value].append(point)
        self.points = []
        self.children = (_Tree(sides[0]), _Tree(sides[1]))


class _Search:
    """The search for the points nearest to a place."""

    def __init__(
        self, place: tuple[float, ...], most: int, is_there: Callable[[str], bool]
    ) -> None:
        self.found: list[tuple[float, str]] = []
        self._place = place
        self._most = most
        self._is_there = is_there

    def visit(self, node: _Tree, offsets: list[float], square: float) -> None:
        """Looks into a node whose nearest corner is ``offsets`` away, in squares ``square``."""
        node.divide()
        if node.children is None:
            for point in node.points:
                self._look_at(*point)
            return
        axis = node.axis
        offset = self._place[axis] - node.value
        is_above = offset >= 0
        self.visit(node.children[is_above], offsets, square)
        before = offsets[axis]
        square += offset * offset - before * before
        if round(math.sqrt(max(square, 0.0)), _DIGITS) <= self._reach():
            offsets[axis] = offset
            self.visit(node.children[not is_above], offsets, square)
            offsets[axis] = before

    def _look_at(self, place: tuple[float, ...], key: str) -> None:
        distance = round(math.dist(self._place, place), _DIGITS)
        if place == self._place or distance > self._reach() or not self._is_there(key):
            return
        self.found.append((distance, key))
        self.found.sort()
        del self.found[self._most :]

    def _reach(self) -> float:
        is_full = len(self.found) >= self._most
        return self.found[-1][0] if is_full else _MOST_DISTANCE


def _rough_kind(text: str) -> tuple[str, ...]:
    """Returns words of a problem's text that similar problems share."""
    words = text.split(" ")
    return (words[0], *words[4:6], *words[7:])


def _described(text: str) -> _Described | None:
    """Returns what similar problems share, and the logarithms of the sizes that may differ; None if
    ``text`` does not describe a problem."""
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
    return kind, tuple(map(_log2, (x[0], x[1], w[0], *x[2:])))


@lru_cache(maxsize=4096)
def _log2(size: int) -> float:
    return math.log2(size)
