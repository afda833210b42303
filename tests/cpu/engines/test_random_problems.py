"""The random problems of tests reach every implementation."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from random_problems import KINDS, TAKES, random_problem

from cudnn_autotune.engines.built_in import BUILT_IN
from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.engines.offers import gpu_of

pytestmark = pytest.mark.search


@pytest.mark.basic(2)
@pytest.mark.parametrize("implementation", BUILT_IN, ids=lambda one: one.name)
def test_random_problems_reach_the_implementation(implementation: Implementation) -> None:
    rng = random.Random(0)
    counts: Counter[str] = Counter()
    for kind in KINDS:
        problems = (random_problem(rng, kind) for _ in range(3000))
        counts[kind] = sum(bool(implementation.offers(p, gpu_of("h200"))) for p in problems)
    assert counts.total() >= 10
    assert {kind for kind in KINDS if counts[kind]} == set(TAKES[implementation.name])
