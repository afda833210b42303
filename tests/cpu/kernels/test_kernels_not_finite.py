"""NaN and infinities in each kernel: where they go, and the work they make, in the emulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import cuda_emulation
from support.conv.references import expected, relative_error, tolerance
from support.cuda_emulation import WORK, Work, run_recipe
from support.cuda_emulation.checks import H200, random_tensors, written
from support.kernels.depthwise_layers import depthwise
from support.kernels.first_layers import first_layer
from support.kernels.grouped_layers import problem as grouped
from support.kernels.not_finite import PATTERNS

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.kernels.family import KernelFamily

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)

FAMILIES = {one.name: one for one in BUILT_IN if isinstance(one, KernelFamily)}
TINY = replace(H200, multiprocessors=1)
"""A GPU whose few blocks go over many tiles."""
CONTIGUOUS = {"memory_format": torch.contiguous_format}


def signal(op: str, length: int, groups: int, width: int, taps: int) -> ConvProblem:
    layer = grouped(op, (2, 1, length), groups, width, (1, taps), 1, (0, 0))
    return replace(layer, dtype=torch.float16)


CASES = {
    "depthwise": [depthwise(op, 8, (14, 15), (3, 3)) for op in ("fprop", "dgrad")],
    "depthwise_1d": [depthwise(op, 4, (90,), (5,)) for op in ("fprop", "dgrad")],
    "depthwise_mma": [
        depthwise("fprop", 16, (20, 26), (7, 7)),
        depthwise("dgrad", 16, (20, 26), (7, 7), padding=3),
        depthwise("fprop", 8, (12, 24), (5, 5), **CONTIGUOUS),
        depthwise("dgrad", 8, (301,), (65,), padding=32),
        depthwise("fprop", 8, (20, 26), (7, 7), padding=3),
    ],
    "depthwise_planes": [
        depthwise(op, 8, (14, 15), (3, 3), **CONTIGUOUS) for op in ("fprop", "dgrad")
    ],
    "depthwise_wgrad": [
        depthwise("wgrad", 16, (22, 23), (3, 3)),
        depthwise("wgrad", 16, (23, 25), (3, 3), stride=2),
        depthwise("wgrad", 16, (22, 23), (3, 3), padding=1),
    ],
    "depthwise_wgrad_mma": [
        depthwise("wgrad", 16, (21, 22), (7, 7)),
        depthwise("wgrad", 8, (301,), (31,)),
    ],
    "few_channels": [first_layer("fprop", (2, 3, 23, 25), (16, 3, 7, 7), 2)],
    "few_channels_planes": [
        first_layer("fprop", (1, 3, 15, 39), (32, 3, 3, 3), 2, **CONTIGUOUS),
    ],
    "few_channels_wgrad": [first_layer("wgrad", (2, 3, 23, 25), (16, 3, 7, 7), 2)],
    "few_filters": [
        first_layer("fprop", (2, 32, 14, 15), (16, 32, 3, 3)),
        first_layer("dgrad", (2, 16, 14, 15), (32, 16, 3, 3)),
    ],
    "grouped": [
        *(grouped(op, (6, 14, 19), 4, 4, padding=0) for op in ("fprop", "dgrad")),
        grouped("dgrad", (4, 14, 19), 4, 4, stride=2, padding=0),
        grouped("fprop", (4, 14, 19), 2, 12, padding=0),
        grouped("fprop", (4, 12, 19), 2, 8, padding=0),
        grouped("fprop", (6, 14, 19), 4, 4, padding=1),
    ],
    "grouped_wgrad": [grouped("wgrad", (2, 14, 19), 4, width, padding=0) for width in (4, 8)],
    "implicit_gemm_1d": [signal(op, 150, 2, 24, 7) for op in ("fprop", "dgrad")],
    "implicit_gemm_1d_wgrad": [
        signal("wgrad", 150, 2, 16, 9),
        signal("wgrad", 90, 2, 64, 3),
        replace(signal("wgrad", 150, 2, 16, 9), padding=(0, 4)),
    ],
}
"""Layers of each kernel."""
MOST_WORK = {"grouped": 2.5}
"""The most work of what is counted, by that with finite numbers, if not 1.5. ``grouped`` multiplies
merged groups apart, of a tile that it has multiplied before. Loads, stores and additions of an
epilogue are not counted, nor what bits of signs take in ``depthwise_mma``."""
SUMMED_AGAIN = {"depthwise_mma", "depthwise_wgrad", "depthwise_wgrad_mma"}
"""Kernels that compute few sums again, one by one, which is much work in these small layers."""


def done(family: KernelFamily, problem: ConvProblem, tensors: dict[str, torch.Tensor]) -> Work:
    """The work of the first offer on some tensors, the last of which it has written."""
    settings = family.offers(problem, TINY)[0].settings
    recipe = family.recipe(problem, settings, TINY)
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


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kernel_has_a_layer(name: str) -> None:
    assert CASES[name]
    assert {problem.op for problem in CASES[name]} <= {"fprop", "dgrad", "wgrad"}
    assert all(FAMILIES[name].offers(problem, TINY) for problem in CASES[name])


@pytest.mark.basic(12)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("operand", ["first", "second"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param(name, problem, id=f"{name}-{i}-{problem.op}")
        for name, problems in CASES.items()
        for i, problem in enumerate(problems)
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
        looks = 2 * tensors["w"].numel() if problem.op == "wgrad" else 0  # at one product of a lane
        assert total(work) <= most * total(finite) + looks, (work, finite)
