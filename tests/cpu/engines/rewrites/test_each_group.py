"""A convolution of wide groups runs group by group, on slices of the tensors."""

from __future__ import annotations

from dataclasses import replace

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
# Input, weight, stride, padding, dilation, groups.
CASES = {
    "2-d": ((2, 128, 5, 7), (160, 64, 3, 3), 1, 1, 1, 2),
    "pointwise": ((1, 240, 6, 3), (192, 80, 1, 1), 1, 0, 1, 3),
    "strided": ((2, 128, 9, 8), (128, 64, 2, 3), (2, 1), (0, 1, 1, 2), 1, 2),
    "dilated": ((1, 256, 8, 7), (256, 64, 3, 2), 1, 2, 2, 4),
    "3-d": ((1, 128, 3, 4, 5), (128, 64, 2, 3, 3), 1, 1, 1, 2),
    "images of height 1": ((3, 192, 1, 21), (320, 96, 1, 5), 1, (0, 2), 1, 2),
}
STYLEGAN2 = ConvProblem(
    "fprop",
    (1, 4096, 64, 64),
    (4096, 512, 3, 3),
    1,
    1,
    groups=8,
    dtype=torch.float16,
    memory_format=torch.channels_last,
)


def problem_of(name: str, **more: object) -> ConvProblem:
    x, *sizes = CASES[name]
    more = {"dtype": torch.float16, "memory_format": CHANNELS_LAST[len(x) - 2], **more}
    return ConvProblem("fprop", x, *sizes, **more)  # type: ignore[arg-type]


def check_first(problem: ConvProblem) -> None:
    offers = EACH_GROUP.offers(problem, H200)
    assert offers, f"nothing is offered for {problem.text}"
    check(EACH_GROUP, problem, offers[0].settings, gpu=H200)


@pytest.mark.basic(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_problem(name: str, dtype: torch.dtype) -> None:
    check_first(problem_of(name, dtype=dtype))


def test_a_bias_and_an_activation_are_applied() -> None:
    check_first(problem_of("2-d", bias=True))
    check_first(problem_of("2-d", bias=True, activation="relu"))


@pytest.mark.parametrize("gpu", ["h100", "h200", "a100"])
def test_images_with_filters_of_their_own_are_offered_tensor_cores(gpu: str) -> None:
    offers = EACH_GROUP.offers(STYLEGAN2, gpu_of(gpu))
    assert offers
    assert all("TENSOR_CORE" in offer.numerical_notes for offer in offers)
    # Nothing is compiled, so a search looks at it first.
    assert not any("RUNTIME_COMPILATION" in offer.behavior_notes for offer in offers)


def test_each_group_is_a_launch_of_the_same_engine() -> None:
    (first, *_) = EACH_GROUP.offers(STYLEGAN2, H200)
    recipe = EACH_GROUP.recipe(STYLEGAN2, first.settings, H200)
    launches = [one for one in recipe.launches if isinstance(one, EngineLaunch)]
    assert len(recipe.launches) == len(launches) == 8
    assert len({(one.problem, one.engine_text) for one in launches}) == 1
    assert launches[0].problem.pixel_strides == (4096, 4096)
    assert [one.x.offset for one in launches] == [group * 512 * 2 for group in range(8)]
    assert [one.w.offset for one in launches] == [group * 512 * 4608 * 2 for group in range(8)]


def test_what_has_no_such_form_is_not_offered() -> None:
    plain = problem_of("2-d")
    assert EACH_GROUP.offers(plain, H200)
    others = {
        "a gradient": replace(plain, op="dgrad"),
        "contiguous": replace(plain, memory_format=torch.contiguous_format),
        "one group": replace(plain, weight_shape=(160, 128, 3, 3), groups=1),
        "narrow groups": replace(plain, weight_shape=(160, 32, 3, 3), groups=4),
        "few outputs of a group": replace(plain, weight_shape=(64, 64, 3, 3)),
        "outputs that are not aligned": replace(plain, weight_shape=(132, 64, 3, 3)),
        "a tensor that is hardly aligned": replace(plain, alignment=(32, 32, 16)),
        "a residual": replace(plain, residual=True),
        "float32": replace(plain, dtype=torch.float32, allow_tf32=True),
    }
    offered = [name for name, problem in others.items() if EACH_GROUP.offers(problem, H200)]
    assert offered == []
