"""The kernels of batch norms, on the emulation of CUDA, against PyTorch in float64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import cuda_emulation
from support.conv.references import assert_close, relative_error
from support.covering import covering
from support.norms.cases import EPS, Norm, by_pytorch, norm
from support.norms.launches import MOMENTUM, SMALL, TOLERANCES, by_kernels

from cudnn_autotune.engines.compiled_kernels import cubin
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.norms.plan import (
    FORMS,
    Form,
    NormPlan,
    NormProblem,
    distinct_plans,
    plan_norm,
    unsupported_by_kernels,
)
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

pytestmark = pytest.mark.skipif(bool(cuda_emulation.WHY_NOT), reason=cuda_emulation.WHY_NOT)


def compare(
    given: Norm, form: Form, *, gpu: Any = SMALL, is_reversed: bool = False, alignment: int = 16
) -> list[NormPlan]:
    """Asserts that the kernels' results are those of PyTorch in float64; returns their plans."""
    plans: list[NormPlan] = []
    found = by_kernels(given, gpu, form, is_reversed=is_reversed, alignment=alignment, plans=plans)
    expected = by_pytorch(given.to(torch.float64))
    for name, wanted in vars(expected).items():
        result = getattr(found, name)
        if wanted is None:
            assert result is None, name
            continue
        assert_close(result, wanted, TOLERANCES[given.input.dtype], name)
    return plans


BOTH = (False, True)


@pytest.mark.basic(5)
@covering(
    3, form=FORMS, dtype=list(TOLERANCES), channels_last=BOTH, residual=BOTH, is_reversed=BOTH
)
def test_layouts_and_dtypes(
    form: Form, dtype: torch.dtype, channels_last: bool, residual: bool, is_reversed: bool
) -> None:
    given = norm((5, 24, 16, 20), dtype, channels_last=channels_last, residual=residual)
    compare(given, form, is_reversed=is_reversed)


SHAPES = {
    "several slabs, the last not whole": (3, 200, 9, 10),
    "odd channels": (3, 13, 7, 5),
    "three channels": (4, 3, 6, 10),
    "one channel": (5, 1, 4, 6),
    "no image": (70, 40),
    "1-d": (4, 16, 37),
    "3-d": (2, 8, 3, 4, 5),
    "few values": (7, 24, 1, 1),
    "one image": (1, 16, 12, 12),
}


@pytest.mark.basic(4)
@covering(form=FORMS, shape=SHAPES, channels_last=BOTH)
def test_shapes(form: Form, shape: tuple[int, ...], channels_last: bool) -> None:
    dtype = torch.float32  # whose single numbers can be copied to shared memory, too
    compare(norm(shape, dtype, channels_last=channels_last, residual=True), form)


@pytest.mark.basic(3)
@covering(form=FORMS, activation=list(NORM_ACTIVATIONS), residual=BOTH)
def test_activations(form: Form, activation: str, residual: bool) -> None:
    compare(norm((6, 16, 5, 6), activation=activation, residual=residual, channels_last=True), form)


@pytest.mark.basic(2)
@covering(form=FORMS, channels_last=BOTH, residual=BOTH)
def test_a_second_gradient(form: Form, channels_last: bool, residual: bool) -> None:
    compare(norm((6, 16, 5, 6), second=True, residual=residual, channels_last=channels_last), form)


@pytest.mark.basic(2)
@covering(form=FORMS, affine=BOTH)
def test_parameters(form: Form, affine: bool) -> None:
    dtype = torch.bfloat16
    compare(norm((6, 16, 5, 6), dtype, affine=affine, parameters=dtype, channels_last=True), form)


@pytest.mark.basic(2)
@covering(form=["kept", "half kept"], channels_last=BOTH, is_reversed=BOTH)
def test_rounds_of_a_kept_form(form: Form, channels_last: bool, is_reversed: bool) -> None:
    """The launch works on several slabs, one after the other, each of several blocks."""
    tight = replace(SMALL, shared_bytes=(120 if form == "kept" else 68) << 10)
    given = norm((6, 144, 16, 20), channels_last=channels_last, residual=True)
    plans = compare(given, form, gpu=tight, is_reversed=is_reversed)
    for plan in plans:
        assert plan.parts > 1 or not channels_last
        assert plan.launches[0].blocks < plan.slabs * plan.parts


@pytest.mark.basic(3)
@covering(
    form=FORMS,
    dtype=list(TOLERANCES),
    shape=[(3, 200, 9, 10), (6, 16, 13, 9), (5, 64, 16, 20), (70, 40)],
)
def test_masks(form: Form, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Masks of rows narrower than a segment, of whole segments, and of some that are not."""
    # Numbers of 16 bits that are rounded to 6 have a gradient of 0.
    activation = "relu6" if dtype is torch.float32 else "relu"
    given = norm(shape, dtype, channels_last=True, residual=True, activation=activation)
    for plan in compare(given, form):
        assert dict(plan.launches[-1].kernel.defines)["MASK"] == 1


@pytest.mark.basic(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_where_the_residuals_gradient_is_not_asked_for(form: Form) -> None:
    given = norm((4, 72, 6, 6), torch.bfloat16, residual=True, channels_last=True)
    found = by_kernels(given, SMALL, form, wants_residual=False)
    expected = by_pytorch(given.to(torch.float64))
    for name in ("grad_input", "grad_weight", "grad_bias"):
        assert_close(getattr(found, name), getattr(expected, name), 1.5e-2, name)


@pytest.mark.basic(3)
@covering(
    form=FORMS,
    channels_last=BOTH,
    alignment=[2, 4, 8],
    dtype=list(TOLERANCES),
    activation=["relu", "silu"],
)
def test_hardly_aligned(
    form: Form, channels_last: bool, alignment: int, dtype: torch.dtype, activation: str
) -> None:
    """Tensors at any multiple of their elements' size. The emulation finds misaligned accesses."""
    alignment = max(alignment, dtype.itemsize)
    given = norm(
        (4, 24, 6, 8),
        dtype,
        activation=activation,
        residual=True,
        second=True,
        channels_last=channels_last,
    )
    for plan in compare(given, form, alignment=alignment):
        vector = int(dict(plan.launches[0].kernel.defines)["VECTOR"])
        assert vector * dtype.itemsize == alignment


@pytest.mark.basic(2)
@covering(form=FORMS, channels_last=BOTH, dtype=list(TOLERANCES))
def test_running_statistics(form: Form, channels_last: bool, dtype: torch.dtype) -> None:
    given = norm((6, 24, 16, 20), dtype, channels_last=channels_last)
    generator = torch.Generator().manual_seed(1)
    running = [torch.rand(24, generator=generator) for _ in range(2)]
    expected = [one.double() for one in running]
    by_kernels(given, SMALL, form, running=running)
    F.batch_norm(given.input.double(), *expected, training=True, momentum=MOMENTUM, eps=EPS)
    for name, found, wanted in zip(("mean", "variance"), running, expected, strict=True):
        assert_close(found, wanted, 3e-6, name)


@pytest.mark.parametrize("form", FORMS)
def test_running_statistics_that_are_not_finite(form: Form) -> None:
    given = norm((6, 16, 5, 6), channels_last=True)
    given.input[0, 3], given.input[0, 4, 0, 0] = math.nan, math.inf
    running = [torch.rand(16) for _ in range(2)]
    running[0][5], running[1][6] = math.inf, math.nan
    expected = [one.clone() for one in running]
    by_kernels(given, SMALL, form, running=running)
    F.batch_norm(given.input, *expected, training=True, momentum=MOMENTUM, eps=EPS)
    for found, wanted in zip(running, expected, strict=True):
        assert torch.equal(found.isfinite(), wanted.isfinite())


@pytest.mark.basic(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_large_mean_costs_no_more_than_it_costs_pytorch(form: Form) -> None:
    given = norm((16, 8, 12, 12), offset=3000.0, channels_last=True)
    found, pytorch = by_kernels(given, SMALL, form), by_pytorch(given)
    expected = by_pytorch(given.to(torch.float64))
    for name in ("output", "unbiased_var", "grad_input", "grad_weight"):
        wanted = getattr(expected, name)
        error = relative_error(getattr(found, name), wanted)
        assert error <= 2 * relative_error(getattr(pytorch, name), wanted) + 2e-6, name


@pytest.mark.basic(3)
@covering(form=FORMS, value=[math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_in_their_channel(form: Form, value: float) -> None:
    given = norm((4, 16, 6, 6), activation="identity", channels_last=True)
    for place in (0, 3):  # the first value of a part is special
        given.input[place, 3, place, place] = value
        found, expected = by_kernels(given, SMALL, form), by_pytorch(given)
        assert torch.equal(found.output.isfinite(), expected.output.isfinite())
        assert torch.equal(found.grad_input.isfinite(), expected.grad_input.isfinite())
        given.input[place, 3, place, place] = 0.0


def test_halves_saturate_as_pytorchs() -> None:
    given = norm((4, 16, 6, 6), torch.float16, activation="identity", channels_last=True)
    given = replace(given, weight=torch.full((16,), 60000.0))
    found, expected = by_kernels(given, SMALL, "kept"), by_pytorch(given)
    assert expected.output.isinf().any()
    assert torch.equal(found.output.isinf(), expected.output.isinf())


@pytest.mark.basic(2)
@pytest.mark.parametrize("mask", [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("residual", [False, True])
def test_gradients_that_are_not_asked_for(residual: bool, mask: tuple[bool, bool]) -> None:
    given = norm((4, 16, 6, 6), residual=residual, channels_last=True)
    wants_input, wants_residual = mask
    found = by_kernels(
        given, SMALL, "kept", wants_input=wants_input, wants_residual=residual and wants_residual
    )
    expected = by_pytorch(given.to(torch.float64))
    assert (found.grad_input is not None) == wants_input
    assert (found.grad_residual is not None) == (residual and wants_residual)
    for name in ("grad_input", "grad_weight", "grad_bias", "grad_residual"):
        result = getattr(found, name)
        if result is not None:
            assert_close(result, getattr(expected, name), 3e-6, name)


@pytest.mark.basic(2)
@pytest.mark.parametrize("seed", range(12))
def test_random_norms(seed: int) -> None:
    source = random.Random(seed)
    dims = source.randint(0, 3)
    shape = (source.randint(2, 6), source.choice([1, 3, 8, 12, 30, 64, 72]))
    shape += tuple(source.randint(1, 9) for _ in range(dims))
    dtype = source.choice(list(TOLERANCES))
    channels_last = source.random() < 0.6
    form = source.choice(FORMS) if dtype is torch.float32 else "two passes"
    gpu = replace(SMALL, multiprocessors=source.randint(1, 7))
    given = norm(
        shape,
        dtype,
        activation=source.choice(["identity", "relu", "silu"]),
        residual=source.random() < 0.5,
        second=source.random() < 0.3,
        channels_last=channels_last,
        seed=seed,
    )
    compare(given, form, gpu=gpu, is_reversed=source.random() < 0.5)


NOTE = [  # the tensors of a ResNet-50
    (64, 64, 3136),
    (64, 256, 3136),
    (64, 512, 784),
    (64, 256, 196),
    (64, 1024, 196),
    (64, 2048, 49),
]


@pytest.mark.parametrize("name", ["h100", "a100", "l4", "t4"])
@pytest.mark.parametrize("planes", [False, True])
def test_plans_fit_every_gpu(name: str, planes: bool) -> None:
    gpu = gpu_of(name)
    for is_backward, (batch, channels, spatial) in itertools.product((False, True), NOTE):
        problem = NormProblem(
            is_backward, torch.bfloat16, torch.float32, batch, channels, spatial, planes, 16, "relu"
        )
        plan = plan_norm(problem, gpu)
        vector = 1 if planes else problem.vector
        units = batch * spatial // (problem.vector if planes else 1)
        assert plan.tile * (plan.parts - 1) < units <= plan.tile * plan.parts
        for launch in plan.launches:
            assert launch.shared_bytes <= gpu.shared_bytes
            assert plan.slabs * int(dict(launch.kernel.defines)["LANES"]) * vector >= channels
        if len(plan.launches) == 1 and plan.parts > 1:  # a block waits for others
            assert plan.launches[0].blocks <= gpu.multiprocessors


def test_the_note_s_tensors_take_one_launch_on_an_h100() -> None:
    """The first two have a backward that reads the input twice, since both tensors do not fit."""
    for is_backward, (batch, channels, spatial) in itertools.product((False, True), NOTE):
        problem = NormProblem(
            is_backward, torch.bfloat16, torch.float32, batch, channels, spatial, False, 16, "relu"
        )
        (launch,) = plan_norm(problem, gpu_of("h100")).launches
        if is_backward:
            assert dict(launch.kernel.defines)["KEEPS_X"] == (spatial < 3136)


def test_a_form_keeps_less_where_the_tensors_do_not_fit() -> None:
    """The note's largest two do not fit on an H100 forward and backward."""
    gpu = gpu_of("h100")
    found = []
    for batch, channels, spatial in NOTE:
        forward = NormProblem(
            False, torch.bfloat16, torch.float32, batch, channels, spatial, False, 16, "relu"
        )
        problems = [forward, replace(forward, is_backward=True)]
        plans = distinct_plans(problems, gpu)
        found.append(list(plans))
        for form, of_form in plans.items():
            assert of_form == [plan_norm(problem, gpu, form) for problem in problems]
        assert next(iter(plans.values())) == [plan_norm(problem, gpu) for problem in problems]
    assert found == [["half kept", "two passes"]] * 2 + [["kept", "half kept", "two passes"]] * 4
    huge = replace(forward, spatial=2**18)
    assert list(distinct_plans([huge], gpu)) == ["two passes"]
    assert plan_norm(huge, gpu, "kept") == plan_norm(huge, gpu, "two passes")


@pytest.mark.slow
@covering(capability=[(7, 5), (8, 0), (9, 0), (10, 0)], planes=BOTH, is_backward=BOTH)
def test_they_compile(capability: tuple[int, int], planes: bool, is_backward: bool) -> None:
    gpu = replace(gpu_of("h100" if capability > (7, 5) else "t4"), compute_capability=capability)
    problem = NormProblem(
        is_backward, torch.bfloat16, torch.float32, 8, 64, 196, planes, 16, "silu",
        residual=not planes, grad_residual=is_backward and not planes,
    )  # fmt: skip
    for (plan,) in distinct_plans([problem], gpu).values():
        for launch in plan.launches:
            assert cubin(launch.kernel, capability)


def test_what_the_kernels_do_not_take() -> None:
    problem = NormProblem(False, torch.float64, torch.float64, 8, 64, 196, False, 16, "relu")
    assert unsupported_by_kernels(problem) is not None
    large = replace(problem, dtype=torch.bfloat16, parameters=torch.float32, spatial=2**22)
    assert unsupported_by_kernels(large) == "the tensor has 2^31 elements or more"
    for size in ("batch", "channels", "spatial"):
        empty = replace(large, **{size: 0})  # type: ignore[arg-type]
        assert unsupported_by_kernels(empty) == "the tensor is empty"
    masked = replace(problem, dtype=torch.float16, parameters=torch.float32, mask=True)
    assert unsupported_by_kernels(masked) is None
    for change in ({"planes": True}, {"channels": 60}, {"alignment": 8}):
        reason = unsupported_by_kernels(replace(masked, **change))  # type: ignore[arg-type]
        assert reason == "a mask is for rows that are read in whole vectors"


@pytest.mark.basic(2)
@covering(form=FORMS, channels_last=BOTH)
def test_a_lone_first_value_does_not_cancel(form: Form, channels_last: bool) -> None:
    """Differences from it are as large as the sum of all squares."""
    given = norm((8, 16, 16, 16), channels_last=channels_last)
    given.input.zero_()
    given.input[0, :, 0, 0] = 100.0
    found, expected = by_kernels(given, SMALL, form), by_pytorch(given.to(torch.float64))
    assert relative_error(found.unbiased_var, expected.unbiased_var) < 1e-4
