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

import numpy as np

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.problem_json import problem_text
from cudnn_autotune.store.codec import problem_of

# The largest useful distance of problems, in powers of two: 3 stands for a factor of eight in one
# size, or smaller factors in several sizes.
_MOST_DISTANCE = 3.0

# This matches what problem_text writes. The names in a file are not trusted, so sizes are bounded.
_SIZE = "[1-9][0-9]{0,18}"
_SIZES = f"{_SIZE}(?:x{_SIZE}){{2,4}}"
_PROBLEM = re.compile(
    rf"(?P<op>\S+) x=(?P<x>{_SIZES}) w=(?P<w>{_SIZES}) padding=\S+ "
    rf"(?P<filter>stride=\S+ dilation=\S+) groups=(?P<groups>{_SIZE}) (?P<types>.*)"
)
# Equal distances, computed in another order, differ by less.
_DIGITS = 9
_SLACK = 10.0**-_DIGITS

_Described = tuple[tuple[object, ...], tuple[float, ...]]


class Neighbours:
    """An index of the keys of decisions, by the kinds of their problems.

    A key is parsed when its kind is first looked for: problems of other kinds cost little.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._waiting: dict[tuple[str, ...], list[str]] = {}
        self._kinds: dict[tuple[object, ...], _Kind] = {}

    def add(self, keys: Iterable[str]) -> None:
        """Adds keys that are not there already."""
        for key in keys:
            if key not in self._keys:
                self._keys.add(key)
                self._waiting.setdefault(_rough_kind(problem_of(key)), []).append(key)

    def nearest(
        self, problem: ConvProblem, most: int, is_there: Callable[[str], bool]
    ) -> list[tuple[float, str]]:
        """Returns up to ``most`` keys of problems similar to ``problem``, without its own, with
        their distances, the nearest first.

        The distance is the Euclidean norm of the base-2 logarithms of the ratios of batch size,
        input channels, output channels and spatial sizes.

        Args:
            is_there: Returns whether an added key still has a decision.
        """
        text = problem_text(problem)
        for key in self._waiting.pop(_rough_kind(text), ()):
            described = _described(problem_of(key))
            if described is not None:
                kind, place = described
                self._kinds.setdefault(kind, _Kind(len(place))).add(place, key)
        own = _described(text)
        assert own is not None
        kind, place = own
        if kind not in self._kinds:
            return []
        return self._kinds[kind].nearest(place, most, is_there)


class _Kind:
    """The keys of one kind, as points by their sizes."""

    def __init__(self, dims: int) -> None:
        self._keys: list[str] = []
        self._new: list[tuple[float, ...]] = []
        self._places = np.empty((0, dims))

    def add(self, place: tuple[float, ...], key: str) -> None:
        self._new.append(place)
        self._keys.append(key)

    def nearest(
        self, place: tuple[float, ...], most: int, is_there: Callable[[str], bool]
    ) -> list[tuple[float, str]]:
        if self._new:
            self._places = np.concatenate([self._places, self._new])
            self._new = []
        distances = np.linalg.norm(self._places - place, axis=1)
        near = np.flatnonzero(distances <= _MOST_DISTANCE + _SLACK)
        found: list[tuple[float, str]] = []
        for index in near[np.argsort(distances[near])].tolist():
            reach = found[-1][0] if len(found) >= most else _MOST_DISTANCE
            if distances[index] > reach + _SLACK:
                break
            other = self._places[index].tolist()
            distance, key = round(math.dist(place, other), _DIGITS), self._keys[index]
            if distance <= reach and tuple(other) != place and is_there(key):
                found = sorted([*found, (distance, key)])[:most]
        return found


def _rough_kind(text: str) -> tuple[str, ...]:
    """Returns words of a problem's text that similar problems share."""
    words = text.split(" ")
    return (words[0], *words[4:6], *words[7:])


def _described(text: str) -> _Described | None:
    """Returns the common part of similar problems, and the logarithms of the sizes that may differ;
    None if ``text`` does not describe a problem."""
    match = _PROBLEM.fullmatch(text)
    if match is None:
        return None
    x, w = (tuple(map(int, match[name].split("x"))) for name in ("x", "w"))
    if len(x) != len(w):
        return None
    groups = int(match["groups"])
    # A depthwise convolution has as many groups as channels.
    grouping = "depthwise" if groups == x[1] > 1 else groups
    kind = (match["op"], w[2:], match["filter"], grouping, match["types"])
    return kind, tuple(map(_log2, (x[0], x[1], w[0], *x[2:])))


@lru_cache(maxsize=4096)
def _log2(size: int) -> float:
    return math.log2(size)
