"""An order of which every beginning is a fair sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

__all__ = ["fair_order"]

_T = TypeVar("_T")


def fair_order(items: Iterable[_T], strata: Callable[[_T], Sequence[Hashable]]) -> list[_T]:
    """The items, so ordered that however few are taken, each stratum has about its share of them.

    Each time the item follows whose strata are furthest behind their shares; among equals that
    which comes first in ``items``.

    Args:
        strata: what an item counts for, as its network, direction and dtype: one of each kind.
    """
    left = [(item, tuple(enumerate(strata(item)))) for item in items]
    shares = {
        stratum: count / len(left)
        for stratum, count in Counter(s for _, of in left for s in of).items()
    }
    taken: Counter[tuple[int, Hashable]] = Counter()
    order: list[_T] = []
    while left:
        ahead = [sum(taken[s] - shares[s] * (len(order) + 1) for s in of) for _, of in left]
        item, of = left.pop(ahead.index(min(ahead)))
        order.append(item)
        taken.update(of)
    return order
