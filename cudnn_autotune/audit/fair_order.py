"""Orders items so that the first ones, however many, are a fair sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np

__all__ = ["fair_order"]

_T = TypeVar("_T")
_NEVER = np.iinfo(np.int64).max


def fair_order(items: Iterable[_T], strata: Callable[[_T], Sequence[Hashable]]) -> list[_T]:
    """Orders items so that, however few are taken, each stratum has about its share of them.

    The next item is always one whose strata are furthest behind their shares. Of several such items
    it is the one that comes first in ``items``.

    Args:
        strata: returns the strata of an item, such as its network, direction and dtype.
    """
    waiting: dict[tuple[tuple[int, Hashable], ...], deque[tuple[int, _T]]] = {}
    for place, item in enumerate(items):
        waiting.setdefault(tuple(enumerate(strata(item))), deque()).append((place, item))
    # Items of the same strata are as far ahead of their shares, and share a row.
    strata_of, rows = list(waiting), list(waiting.values())
    rows_with: dict[tuple[int, Hashable], list[int]] = {}
    for row, of in enumerate(waiting):
        for stratum in of:
            rows_with.setdefault(stratum, []).append(row)
    total = sum(map(len, rows))
    arrays = {stratum: np.array(its) for stratum, its in rows_with.items()}
    count = {s: sum(len(rows[row]) for row in its) for s, its in rows_with.items()}
    counts = np.array([sum(count[s] for s in of) for of in waiting], dtype=np.int64)
    taken = np.zeros_like(counts)
    first = np.array([queue[0][0] for queue in rows])
    order: list[_T] = []
    while len(order) < total:
        # Shares times the number of all items are integers, so that ties are exact.
        ahead = taken * total - counts * (len(order) + 1)
        ahead[first < 0] = _NEVER
        least = np.flatnonzero(ahead == ahead.min())
        row = int(least[np.argmin(first[least])])
        order.append(rows[row].popleft()[1])
        first[row] = rows[row][0][0] if rows[row] else -1
        for stratum in strata_of[row]:
            taken[arrays[stratum]] += 1
    return order
