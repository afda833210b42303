"""Groups of many channels are computed one by one, on slices of the tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda_emulation
import pytest
import torch
from cuda_emulation.checks import check

from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.engines.recipe import EngineLaunch
from cudnn_autotune.engines.rewrites.each_group import EachGroup

pytestmark = [
    pytest.mark.search,
    pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT),
]
EACH_GROUP = EachGroup()
H200 = gpu_of("h200")
CASES: dict[str, dict[str, Any]] = {
    "2-d": {"input_shape": (2, 192, 5, 6), "weight_shape": (240, 64, 3, 3), "groups": 3},
    "strided": {"input_shape": (1, 160, 7, 6), "weight_shape": (128, 80, 3, 1), "groups": 2},
    "3-d": {"input_shape": (1, 128, 3, 4, 5), "weight_shape": (128, 64, 1, 3, 3), "groups": 2},
}


def problem_of(name: str, **more: Any) -> ConvProblem:
    case = {"padding": 1, "dtype": torch.float16, **CASES[name], **more}
    if name == "strided":
        case["stride"] = 2
    memory_format = CHANNELS_LAST[len(case["input_shape"]) - 2]
    return ConvProblem("fprop", **{"memory_format": memory_format, **case})


@pytest.mark.parametrize(
    "added", [{}, {"bias": True}, {"bias": True, "activation": "relu"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_problem(
    name: str, dtype: torch.dtype, added: dict[str, Any]
) -> None:
    problem = problem_of(name, dtype=dtype, **added)
    offers = EACH_GROUP.offers(problem, H200)
    assert offers, problem.text
    check(EACH_GROUP, problem, offers[0].settings, gpu=H200)


def test_nothing_is_copied() -> None:
    problem = problem_of("2-d", bias=True)
    recipe = EACH_GROUP.recipe(problem, EACH_GROUP.offers(problem, H200)[0].settings, H200)
    assert recipe.workspace_bytes == 0
    launches = [launch for launch in recipe.launches if isinstance(launch, EngineLaunch)]
    assert len(recipe.launches) == len(launches) == 3
    inner = launches[0].problem
    assert (inner.groups, inner.pixel_strides) == (1, (192, 240))
    assert [launch.x.offset for launch in launches] == [0, 2 * 64, 2 * 128]
    assert [launch.w.offset for launch in launches] == [2 * 80 * 64 * 9 * i for i in range(3)]
    assert [launch.y.offset for launch in launches] == [0, 2 * 80, 2 * 160]
    assert [launch.bias.offset for launch in launches if launch.bias] == [0, 2 * 80, 2 * 160]


def test_others_are_not_offered() -> None:
    plain = problem_of("2-d")
    assert EACH_GROUP.offers(plain, H200)
    others = [
        replace(plain, op="dgrad"),
        replace(plain, op="wgrad"),
        replace(plain, memory_format=torch.contiguous_format),
        replace(plain, dtype=torch.float32),
        replace(plain, groups=1, weight_shape=(240, 192, 3, 3)),
        replace(plain, groups=6, weight_shape=(240, 32, 3, 3)),
        replace(plain, weight_shape=(216, 64, 3, 3)),
        replace(plain, input_shape=(2, 204, 5, 6), weight_shape=(240, 68, 3, 3)),
        replace(plain, residual=True),
        replace(plain, alignment=(16, 32, 32)),
    ]
    assert not [problem.text for problem in others if EACH_GROUP.offers(problem, H200)]
