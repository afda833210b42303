"""The weight gradient of grouped convolutions on tensor cores, run by the emulation of CUDA."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cuda_emulation
from support.covering import covering
from support.cuda_emulation import WORK
from support.cuda_emulation.checks import H200, check, check_not_finite, random_tensors
from support.kernels.grouped_layers import LAYERS, edges
from support.kernels.grouped_layers import problem as grouped_problem

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.kernels.grouped.grouped_wgrad import GroupedWgrad

emulated = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)
WGRAD = GroupedWgrad()
TYPES = {"half": torch.float16, "tf32": torch.float32}
SMALL = replace(gpu_of("l4"), multiprocessors=2)


def problem(*layer: Any, op: str = "wgrad", **options: Any) -> ConvProblem:
    return grouped_problem(op, *layer, **options)


def settings_of(what: ConvProblem, gpu: Gpu = H200) -> list[str]:
    return [offer.settings for offer in WGRAD.offers(what, gpu)]


@pytest.mark.basic(4)
@emulated
@covering(layer=LAYERS, dtype=TYPES)
def test_layers_of_models(layer: Any, dtype: torch.dtype) -> None:
    what = problem(*layer, dtype=dtype)
    found = settings_of(what)
    if layer == LAYERS["56 wide"] and dtype == torch.float32:
        assert found == [], "its sums take more registers than a thread has"
        return
    assert len(found) >= 2
    # Each variant takes a second to compile.
    for index, settings in enumerate(found[: 2 if layer[2] == 24 else 1]):
        check(WGRAD, what, settings, is_reversed=index == 1)


@pytest.mark.basic(1)
@emulated
@covering(stride=[1, 2], dtype=TYPES)
def test_what_is_loaded_together_lies_in_different_banks(stride: int, dtype: torch.dtype) -> None:
    """But for some where zeros stand in for pixels beside the output."""
    for width in (32, 30):
        what = problem((2, 13, width * stride), 2, 24, 3, stride, dtype=dtype)
        WORK.matrices = WORK.conflicts = 0
        check(WGRAD, what, settings_of(what)[0])
        may_conflict = dtype != torch.float32 and width % 8 > 0
        assert WORK.conflicts <= may_conflict * WORK.matrices / 8
        assert WORK.matrices > 0


@pytest.mark.basic(4)
@emulated
@edges("wgrad")
def test_edges(op: str, layer: Any) -> None:
    dtype = random.Random(repr(layer)).choice((torch.bfloat16, torch.float32))
    what = problem(*layer, op=op, dtype=dtype)
    for is_reversed in (False, True):
        check(WGRAD, what, settings_of(what)[0], is_reversed=is_reversed)


@pytest.mark.slow
@emulated
@covering(dtype=TYPES)
def test_a_block_goes_over_several_tiles(dtype: torch.dtype) -> None:
    what = problem((9, 17, 20), 2, 24, dtype=dtype)
    for settings in settings_of(what, SMALL):
        multiply, add = WGRAD.recipe(what, settings, SMALL).launches
        assert 1 <= multiply.grid[1] == add.arguments[2] < multiply.arguments[10]
        check(WGRAD, what, settings, gpu=SMALL)


@pytest.mark.slow
@emulated
def test_random_shapes() -> None:
    draw = random.Random(0)
    for seed in range(9):
        kernel, stride = draw.choice([(3, 1), (3, 2), (5, 2)])
        shape = (draw.randint(1, 5), draw.randint(3, 30), draw.randint(3, 30))
        width = draw.choice([4, 8, 24])
        groups = 2 * draw.randint(1, 3)
        dtype = (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
        padding = draw.randint(1, kernel)
        what = problem(shape, groups, width, kernel, stride, padding, dtype=dtype)
        settings = draw.choice(settings_of(what))
        check(WGRAD, what, settings, is_reversed=bool(seed % 2), seed=seed)


@pytest.mark.basic(2)
@emulated
@covering(width=[4, 24], stride=[1, 2], dtype=TYPES)
def test_nan_and_infinity_stay_where_they_belong(
    width: int, stride: int, dtype: torch.dtype
) -> None:
    """Beside the output dy is zero, but x may be infinite: that must not make a NaN."""
    what = problem((2, 9, 11), 4, width, 3, stride, 0, dtype=dtype)
    for where in ((0, 1, 8, 10), (0, width + 1, 2, 3), (1, -1, 0, 0)):
        tensors = random_tensors(what)
        tensors["x"][where] = torch.inf
        tensors["y"][0, 2 * width + 3, 1, 1] = torch.nan
        check_not_finite(WGRAD, what, settings_of(what)[0], tensors)


def test_the_workspace_holds_the_sums_of_all_blocks() -> None:
    what = problem((64, 14, 14), 24, 24)
    for offer in WGRAD.offers(what, H200):
        multiply, add = WGRAD.recipe(what, offer.settings, H200).launches
        blocks = dict(multiply.kernel.defines)["MIN_BLOCKS"]
        assert math.prod(multiply.grid) <= 132 * blocks  # all are there at once
        assert offer.workspace_bytes == multiply.grid[1] * 576 * 24 * 9 * 4
        assert add.arguments[2:] == (multiply.grid[1], 576 * 24 * 9)
        assert offer.numerical_notes == ("TENSOR_CORE",)


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "fprop"},
        {"op": "dgrad"},
        {"dtype": torch.float32, "allow_tf32": False},
        {"dtype": torch.float64},
        {"memory_format": torch.contiguous_format},
        {"dilation": 2},
        {"stride": 3},
        {"width": 2},
        {"width": 4, "groups": 3},
        {"alignment": (8, 32, 32)},
        {"width": 64},
    ],
    ids=str,
)
def test_what_is_not_offered(changed: dict[str, Any]) -> None:
    fields = {"x": (2, 20, 20), "groups": 4, "width": 24, "padding": 3}
    assert settings_of(problem(**fields))
    assert not settings_of(problem(**(fields | changed)))
