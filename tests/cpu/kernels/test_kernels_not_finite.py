"""NaN and infinities in each kernel: where they go, and the work they make, in the emulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import cuda_emulation
from support.conv.references import expected, relative_error, tolerance
from support.cuda_emulation import WORK, Work, run_recipe
from support.cuda_emulation.checks import random_tensors, written
from support.kernels.battery import TINY, Family
from support.kernels.families import FAMILIES
from support.kernels.not_finite import PATTERNS

from cudnn_autotune.engines.problem import ConvProblem

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

MOST_WORK = {"grouped": 2.5}
"""The most work of what is counted, by that with finite numbers, if not 1.5. ``grouped`` multiplies
merged groups apart, of a tile that it has multiplied before. Loads, stores and additions of an
epilogue are not counted, nor what bits of signs take in ``depthwise_mma``."""
SUMMED_AGAIN = {"depthwise_mma"}
"""Kernels that compute few sums again, one by one, which is much work in these small layers."""


def done(family: Family, problem: ConvProblem, tensors: dict[str, torch.Tensor]) -> Work:
    """The work of the first offer on some tensors, the last of which it has written."""
    settings = family.settings_of(problem, TINY)[0]
    recipe = family.kernel.recipe(problem, settings, TINY)
    workspace = torch.full((recipe.workspace_bytes,), 0xFF, dtype=torch.uint8)
    WORK.__init__()  # type: ignore[misc]
    run_recipe(recipe, {**tensors, "workspace": workspace})
    return replace(WORK)


def total(work: Work) -> float:
    """Instructions of a warp, about: a matrix loaded by four, a product, 32 numbers converted."""
    return work.matrices / 4 + work.products + work.numbers / 32


def has_padding(problem: ConvProblem) -> bool:
    """Whether zeros are multiplied, as behind the borders of a gradient of the input."""
    return problem.op == "dgrad" or max(problem.padding) > 0


@pytest.mark.basic(12)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("operand", ["first", "second"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param(name, problem, id=f"{name}-{i}-{problem.op}")
        for name, family in FAMILIES.items()
        for i, problem in enumerate(family.patterns)
    ],
)
def test_results_and_work(name: str, problem: ConvProblem, operand: str, pattern: str) -> None:
    """The result is NaN, infinite and finite where it is in float64. Where weights that are not
    finite meet padding, only the groups of others are looked at."""
    family = FAMILIES[name]
    finite = done(family, problem, random_tensors(problem))
    tensors = random_tensors(problem)
    reads = {"fprop": "xw", "dgrad": "yw", "wgrad": "xy"}[problem.op]
    spoilt = tensors[reads[operand == "second"]]
    PATTERNS[pattern](spoilt, torch.Generator().manual_seed(1))
    work = done(family, problem, tensors)

    found, wanted = tensors[written(problem)].double(), expected(problem, tensors)
    if operand == "second" and problem.op != "wgrad" and has_padding(problem):
        of_groups = tensors["w"].isfinite().reshape(problem.groups, -1).all(1)
        inside = of_groups.repeat_interleave(found.shape[1] // problem.groups)
        found, wanted = found[:, inside], wanted[:, inside]
        assert bool(wanted.isfinite().all())
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isposinf(), wanted.isposinf())
    assert torch.equal(found.isneginf(), wanted.isneginf())
    is_finite = wanted.isfinite()
    if bool(is_finite.any()):
        error = relative_error(found[is_finite], wanted[is_finite])
        assert error <= tolerance(problem.dtype, problem.allow_tf32)

    if name not in SUMMED_AGAIN or pattern not in ("an infinity in each channel", "one NaN"):
        most = 1.5 if pattern == "all NaN" and name != "grouped" else MOST_WORK.get(name, 1.5)
        assert total(work) <= most * total(finite), (work, finite)
