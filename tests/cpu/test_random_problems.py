"""The random problems of tests reach every implementation."""

from __future__ import annotations

import random

import pytest
from random_problems import KINDS, random_problem

from cudnn_autotune.engines.built_in import BUILT_IN
from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.engines.offers import gpu_of

pytestmark = pytest.mark.search


@pytest.mark.parametrize("implementation", BUILT_IN, ids=lambda one: one.name)
def test_random_problems_reach_the_implementation(implementation: Implementation) -> None:
    rng = random.Random(0)
    problems = [random_problem(rng, kind) for kind in KINDS for _ in range(3000)]
    assert sum(bool(implementation.offers(p, gpu_of("h200"))) for p in problems) >= 10
