"""A convolution of stride 1 is solved by an engine for the opposite direction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import cuda_emulation
from support.cuda_emulation.checks import assert_compiles, check

from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.engines.recipe import Address, EngineLaunch, KernelLaunch
from cudnn_autotune.kernels.rewrites.adjoint import Adjoint

pytestmark = [
    pytest.mark.search,
    pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT),
]
ADJOINT = Adjoint()
H200 = gpu_of("h200")
# Input, weight, padding, dilation, groups.
CASES = {
    "1-d": ((2, 12, 40), (8, 6, 16), 8, 1, 2),
    "1-d, uneven padding": ((1, 6, 30), (9, 2, 17), (16, 3), 1, 3),
    "1-d, dilated": ((2, 8, 50), (8, 4, 16), 5, 3, 2),
    "1-d, no padding": ((1, 8, 33), (4, 4, 20), 0, 1, 2),
    "2-d": ((2, 8, 9, 11), (12, 4, 5, 4), (2, 3), 1, 2),
    "2-d, one input channel": ((1, 4, 12, 9), (12, 1, 4, 5), (1, 4), 1, 4),
    "2-d, dilated": ((1, 6, 14, 15), (6, 2, 4, 4), 3, (2, 1), 3),
    "3-d": ((1, 4, 5, 6, 7), (6, 2, 3, 3, 2), (1, 2, 1), 1, 2),
}


def problem_of(name: str, op: str, *, channels_last: bool = False, **more: object) -> ConvProblem:
    x, w, padding, dilation, groups = CASES[name]
    if channels_last:
        more["memory_format"] = CHANNELS_LAST[len(x) - 2]
    more = {"dtype": torch.float16, **more}
    return ConvProblem(op, x, w, 1, padding, dilation, groups, **more)  # type: ignore[arg-type]


def check_first(problem: ConvProblem, *, is_reversed: bool = False) -> None:
    offers = ADJOINT.offers(problem, H200)
    assert offers, f"nothing is offered for {problem.text}"
    check(ADJOINT, problem, offers[0].settings, gpu=H200, is_reversed=is_reversed)


@pytest.mark.basic(6)
@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_that_of_the_problem(name: str, op: str) -> None:
    check_first(problem_of(name, op))
    if "1-d" not in name:
        check_first(problem_of(name, op, channels_last=True), is_reversed=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_bias_is_added(channels_last: bool, dtype: torch.dtype) -> None:
    check_first(problem_of("2-d", "fprop", bias=True, dtype=dtype, channels_last=channels_last))


def test_a_bias_of_as_many_elements_as_a_tensor_may_have() -> None:
    """The last block's threads reach beyond 2^31. All blocks before the last two are left out."""
    plain = problem_of("2-d", "fprop", bias=True)
    *_, launch = ADJOINT.recipe(plain, ADJOINT.offers(plain, H200)[0].settings, H200).launches
    assert isinstance(launch, KernelLaunch)
    count, threads, channels = 2**31 - 3, 192, 4
    blocks = -(-count // threads)
    assert blocks * threads > 2**31
    first = (blocks - 2) * threads
    y, bias = torch.zeros(2 * threads, dtype=torch.float16), torch.arange(4, dtype=torch.float16)
    arguments = (Address("y", -2 * first), Address("bias"), count, channels, 1)
    large = replace(launch, grid=(blocks, 1, 1), block=(threads, 1, 1), arguments=arguments)
    cuda_emulation.launch_kernel(large, {"y": y, "bias": bias}, first_block=blocks - 2)
    places = torch.arange(first, first + 2 * threads)
    assert torch.equal(y, torch.where(places < count, bias[places % channels], 0))


def test_the_engine_is_of_the_other_direction() -> None:
    for op, other in (("fprop", "dgrad"), ("dgrad", "fprop")):
        problem = problem_of("1-d, uneven padding", op)
        recipe = ADJOINT.recipe(problem, ADJOINT.offers(problem, H200)[0].settings, H200)
        (engine,) = (one for one in recipe.launches if isinstance(one, EngineLaunch))
        assert engine.problem.op == other
        assert engine.problem.padding == (0, 13)
        assert engine.problem.weight_shape == (6, 3, 17)
        assert engine.problem.output_shape == problem.input_shape
        assert_compiles(recipe, (9, 0))
        assert_compiles(recipe, (7, 5))


def test_what_has_no_such_form_is_not_offered() -> None:
    plain = problem_of("2-d", "fprop")
    assert ADJOINT.offers(plain, H200)
    others = {
        "a stride": replace(plain, stride=2),
        "padding beyond the kernel": replace(plain, padding=(5, 3)),
        "a residual": replace(plain, residual=True),
        "an activation": replace(plain, activation="relu"),
        "a gradient of the weight": replace(plain, op="wgrad"),
        "few taps": replace(plain, weight_shape=(12, 4, 3, 3)),
        "one group": replace(plain, weight_shape=(12, 8, 5, 4), groups=1),
        "depthwise": replace(plain, weight_shape=(8, 1, 5, 4), groups=8),
        "float64": replace(plain, dtype=torch.float64),
    }
    assert [name for name, problem in others.items() if ADJOINT.offers(problem, H200)] == []
    with pytest.raises(ValueError, match="adjoint offers"):
        ADJOINT.recipe(others["a stride"], "eng1", H200)
    assert not ADJOINT.offers(plain, replace(H200, device=None))
