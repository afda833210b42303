"""The random problems of tests reach every implementation."""

from __future__ import annotations

import random

import pytest
from support.kernels.random_problems import KINDS, TAKES, random_problem

from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.built_in import BUILT_IN

pytestmark = pytest.mark.search


@pytest.fixture(scope="module")
def problems() -> dict[str, list[ConvProblem]]:
    rngs = {kind: random.Random(kind) for kind in KINDS}
    return {kind: [random_problem(rng, kind) for _ in range(3000)] for kind, rng in rngs.items()}


@pytest.mark.parametrize("implementation", BUILT_IN, ids=lambda one: one.name)
def test_random_problems_reach_the_implementation(
    implementation: Implementation, problems: dict[str, list[ConvProblem]]
) -> None:
    taken = TAKES[implementation.name]
    gpu = gpu_of("h200")
    for kind, drawn in problems.items():
        looked_at = drawn if kind in taken else drawn[:150]
        assert any(implementation.offers(p, gpu) for p in looked_at) == (kind in taken), kind
