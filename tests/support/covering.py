"""A covering sample of a product of arguments, where the whole product takes too long."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest


def covering(strength: int = 2, **factors: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by few cases among which any values of any ``strength`` arguments meet.

    Args:
        strength: The number of arguments of which every combination of values is in some case.
        factors: The name of an argument -> its values, or a mapping whose keys name them.
    """
    labels = [[_label(key) for key in values] for values in factors.values()]
    values = [list(v.values() if isinstance(v, Mapping) else v) for v in factors.values()]
    places = list(itertools.product(*(range(len(some)) for some in values)))
    together = list(itertools.combinations(range(len(factors)), min(strength, len(factors))))
    meetings = {p: {(c, tuple(p[i] for i in c)) for c in together} for p in places}
    missing = set[object]().union(*meetings.values())
    cases = []
    while missing:
        # The first of the cases in which most of what is missing meets.
        best = max(places, key=lambda place: len(meetings[place] & missing))
        missing -= meetings[best]
        cases.append(best)
    return pytest.mark.parametrize(
        tuple(factors),
        [
            pytest.param(
                *(some[i] for some, i in zip(values, case, strict=True)),
                id="-".join(some[i] for some, i in zip(labels, case, strict=True)),
            )
            for case in sorted(cases)
        ],
    )


def _label(value: object) -> str:
    name = getattr(value, "__name__", None) or str(value).removeprefix("torch.")
    assert " at 0x" not in name, "the values of an argument that has no name need a mapping"
    return name
