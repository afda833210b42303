"""The covering sample that takes the place of products of arguments."""

from __future__ import annotations

import itertools

import pytest
from support.covering import covering

FACTORS = {"a": ["x", "y", "z"], "b": {"few": 1, "many": 9}, "c": [False, True], "d": range(4)}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 30), (4, 48)])
def test_any_values_of_so_many_arguments_meet(strength: int, most: int) -> None:
    names, cases = covering(strength, **FACTORS).args
    assert names == tuple(FACTORS)
    values = [case.values for case in cases]
    factors = [list(f.values()) if isinstance(f, dict) else list(f) for f in FACTORS.values()]
    for some in itertools.combinations(range(len(factors)), strength):
        wanted = set(itertools.product(*(factors[i] for i in some)))
        assert {tuple(case[i] for i in some) for case in values} == wanted
    assert len(values) == len(set(values)) <= most
    assert {case.id.split("-")[1] for case in cases} == {"few", "many"}
