"""The check of an output looks everywhere, at other places each time, and condemns none that is
right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.references import random_operands, reference
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.timers.measuring import WRITTEN, telling_operands
from cudnn_autotune.tuning.checking import is_telling, relative_error, tolerance

OPS = ("fprop", "dgrad", "wgrad")
BOTH = ("fprop", "dgrad")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
READ = {"fprop": (0, 1), "dgrad": (2, 1), "wgrad": (2, 0)}

Tensors = tuple[Tensor, ...]
Spoil = Callable[[Tensor], Any]


def exact(problem: ca.ConvProblem, tensors: Tensors) -> Tensor:
    """The result in float64."""
    a, b = (tensors[place] for place in READ[problem.op])
    return reference(problem, a, b)


def data_of(problem: ca.ConvProblem) -> tuple[Tensors, Tensor]:
    """(x, w, y), and what the one that the operation writes must become."""
    a, b = random_operands(problem)
    right = reference(problem, a, b).to(problem.dtype)
    places = dict(zip(READ[problem.op], (a, b), strict=True))
    tensors = tuple(places.get(place, torch.empty_like(right)) for place in range(3))
    return tensors, right


def error_of(
    problem: ca.ConvProblem,
    tensors: Tensors,
    output: Tensor,
    spoil: Spoil = lambda output: None,
    seed: int | None = None,
) -> float | None:
    """The error of ``output``, but for what ``spoil`` does to it."""
    written = tensors[WRITTEN[problem.op]]

    def run() -> None:
        written.copy_(output)
        spoil(written)

    return relative_error(problem, run, *tensors, seed=seed)


def is_found(error: float | None, problem: ca.ConvProblem) -> bool:
    return error is not None and error > tolerance(problem)


def images(op: str, count: int, dtype: torch.dtype, **changes: Any) -> ca.ConvProblem:
    shape: dict[str, Any] = {
        "input_shape": (count, 8, 7, 6), "weight_shape": (8, 8, 3, 3), "padding": 1,
        "dtype": dtype, "allow_tf32": False,
    }  # fmt: skip
    return ca.ConvProblem(op, **{**shape, **changes})


# Where it looks


@pytest.mark.basic(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", BOTH)
def test_one_wrong_image_of_256_is_found_wherever_it_is(op: str, dtype: torch.dtype) -> None:
    problem = images(op, 256, dtype)
    tensors, right = data_of(problem)
    for image in range(256):
        error = error_of(problem, tensors, right, lambda y, image=image: y[image].zero_())
        assert is_found(error, problem), image


def test_one_wrong_image_of_more_is_found_as_often_as_the_docs_say() -> None:
    """256 of 600 are looked at, and the first and the last."""
    problem = images("fprop", 600, torch.float16, input_shape=(600, 2, 5, 5),
                     weight_shape=(2, 2, 3, 3))  # fmt: skip
    tensors, right = data_of(problem)
    for image, share in ((0, 1.0), (599, 1.0), (301, 256 / 600)):
        found = [
            error_of(problem, tensors, right, lambda y, image=image: y[image].fill_(9), seed)
            for seed in range(100)
        ]
        count = sum(is_found(error, problem) for error in found)
        assert count == pytest.approx(100 * share, abs=20 * (share < 1))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("op", BOTH)
def test_a_wrong_channel_row_or_column_of_all_images_is_found(
    op: str, memory_format: torch.memory_format
) -> None:
    problem = images(op, 3, torch.bfloat16, input_shape=(3, 40, 61, 57),
                     weight_shape=(40, 40, 3, 3), memory_format=memory_format)  # fmt: skip
    tensors, right = data_of(problem)
    for dim, size in ((1, 40), (2, 61), (3, 57)):
        for index in range(0, size, 4):
            error = error_of(
                problem, tensors, right, lambda y, d=dim, i=index: y.select(d, i).zero_()
            )
            assert is_found(error, problem), (dim, index)


def test_a_wrong_row_of_one_image_is_found_as_often_as_the_docs_say() -> None:
    """Four places of each of 64 images, in one of 32 rows."""
    problem = images("fprop", 64, torch.float16, input_shape=(64, 8, 32, 8))
    tensors, right = data_of(problem)
    found = [
        error_of(problem, tensors, right, lambda y: y[17, :, 11].zero_(), seed)
        for seed in range(200)
    ]
    share = sum(is_found(error, problem) for error in found) / 200
    assert share == pytest.approx(1 - (1 - 1 / 32) ** 4, abs=0.06)


@pytest.mark.parametrize("op", BOTH)
def test_of_few_places_all_are_looked_at(op: str) -> None:
    problem = images(op, 4, torch.float16)
    tensors, right = data_of(problem)
    for place in range(4 * 7 * 6):
        image, row, column = place // 42, place // 6 % 7, place % 6

        def spoil(y: Tensor, at: tuple[Any, ...] = (image, slice(None), row, column)) -> None:
            y[at] += 3

        assert is_found(error_of(problem, tensors, right, spoil), problem), place


@pytest.mark.parametrize("groups", [2, 3, 8, 9, 16, 17, 24, 32, 33, 64])
def test_one_kernel_of_each_group_is_found_wrong_or_alone_right(groups: int) -> None:
    """The groups share out their kernels among them."""
    problem = ca.ConvProblem(
        "wgrad", (2, 2 * groups, 6, 5), (8 * groups, 2, 3, 3), padding=1, groups=groups,
        dtype=torch.float16,
    )  # fmt: skip
    tensors, right = data_of(problem)
    for kernel in range(8):

        def all_but_one(w: Tensor, kernel: int = kernel) -> None:
            kept = w.view(groups, 8, -1)[:, kernel].clone()
            w.fill_(77)
            w.view(groups, 8, -1)[:, kernel] = kept

        def one(w: Tensor, kernel: int = kernel) -> None:
            w.view(groups, 8, -1)[:, kernel].zero_()

        for spoil in (all_but_one, one) if groups >= 16 else (all_but_one,):
            for seed in range(10):
                assert is_found(error_of(problem, tensors, right, spoil, seed), problem), kernel


# (groups, kernels of a group, channels of a group, taps), and the share of checks that look at one
# kernel, one channel of all kernels, and one tap of all, none of which is the first or the last.
WEIGHTS: dict[str, tuple[tuple[int, int, int, tuple[int, ...]], float, float, float]] = {
    "plain": ((1, 50, 40, (3, 3)), 14 / 48, 14 / 38, 1.0),
    "small": ((1, 12, 10, (3, 3)), 1.0, 1.0, 1.0),
    "large taps": ((1, 8, 8, (5, 7)), 1.0, 1.0, 7 / 33),
    "groups": ((32, 8, 4, (3, 3)), 1 / 8, 2 / 4, 1.0),
    "depthwise": ((80, 1, 1, (3, 3)), 30 / 78, 30 / 78, 1.0),
    "one dimension": ((2, 20, 12, (11,)), 6 / 18, 1.0, 7 / 9),
}


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_wrong_kernel_channel_or_tap_is_found_as_often_as_the_docs_say(name: str) -> None:
    (groups, kernels, channels, taps), *shares = WEIGHTS[name]
    pad = tuple(tap // 2 for tap in taps)
    shape = (2, groups * channels, *(7 + tap for tap in taps))
    problem = ca.ConvProblem(
        "wgrad", shape, (groups * kernels, channels, *taps), padding=(*pad, *pad), groups=groups,
        dtype=torch.float16,
    )  # fmt: skip
    tensors, right = data_of(problem)
    group, kernel, channel, tap = groups // 2, kernels // 2, channels // 2, math.prod(taps) // 2 - 1

    def spoils() -> Iterator[Spoil]:
        yield lambda w: w.view(groups, kernels, -1)[group, kernel].fill_(50)
        yield lambda w: w.view(groups, kernels, channels, -1)[group, :, channel].fill_(50)
        yield lambda w: w.view(groups, kernels, channels, -1)[..., tap].fill_(50)

    checks = 150
    for spoil, share in zip(spoils(), shares, strict=True):
        found = [error_of(problem, tensors, right, spoil, seed) for seed in range(checks)]
        count = sum(is_found(error, problem) for error in found)
        spread = 4 * math.sqrt(checks * share * (1 - share))
        assert count == pytest.approx(checks * share, abs=spread)


@pytest.mark.parametrize("op", OPS)
def test_each_check_looks_elsewhere_and_a_seed_looks_there_again(op: str) -> None:
    problem = ca.ConvProblem(op, (4, 40, 24, 24), (48, 40, 3, 3), padding=1, dtype=torch.float16)
    tensors, right = data_of(problem)
    fresh = {error_of(problem, tensors, right) for _ in range(4)}
    assert len(fresh) > 1
    assert len({error_of(problem, tensors, right, seed=7) for _ in range(4)}) == 1


# Places that nothing reaches


@pytest.mark.parametrize("stride", [2, 3, 7])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_places_that_no_tap_reaches_are_looked_at_and_do_not_dilute(dims: int, stride: int) -> None:
    """Of a strided pointwise layer's gradient most places are zero."""
    size = {1: 900, 2: 42, 3: 14}[dims]
    problem = ca.ConvProblem(
        "dgrad", (3, 4, *[size] * dims), (6, 4, *[1] * dims), stride=stride, dtype=torch.float32
    )
    tensors, right = data_of(problem)
    for _ in range(5):
        assert error_of(problem, tensors, right) < tolerance(problem)
    reached = (slice(None), slice(None), *[slice(None, None, stride)] * dims)

    def spoil_reached(x: Tensor) -> None:
        x[reached] = 0

    def spoil_others(x: Tensor) -> None:
        kept = x[reached].clone()
        x.fill_(9)
        x[reached] = kept

    assert is_found(error_of(problem, tensors, right, spoil_reached), problem)
    assert is_found(error_of(problem, tensors, right, spoil_others), problem)


def test_a_result_that_reads_only_padding_must_be_zero() -> None:
    problem = ca.ConvProblem("fprop", (2, 3, 1, 1), (4, 3, 1, 1), stride=9, padding=4)
    tensors, right = data_of(problem)
    if bool(right.any()):
        pytest.fail("this problem was to read only padding")
    assert error_of(problem, tensors, right) == 0
    assert error_of(problem, tensors, right, lambda y: y.fill_(1e-3)) == math.inf


# Large problems are summed in portions


# What is right is not condemned


def uneven(rng: torch.Generator, tensor: Tensor, spread: float) -> Tensor:
    """``tensor`` with images and channels of very different size, as activations and gradients
    have, and some of them zero."""
    scaled = tensor.double()
    for dim in (0, 1):
        size = [1] * tensor.dim()
        size[dim] = tensor.shape[dim]
        factors = torch.exp(spread * torch.randn(size, generator=rng, dtype=torch.float64))
        factors[torch.rand(size, generator=rng) < 0.15] = 0
        scaled = scaled * factors
    return scaled.to(tensor.dtype)


def random_problem(rng: torch.Generator, op: str, dtype: torch.dtype) -> ca.ConvProblem:
    def draw(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=rng))]

    dims, groups = draw(1, 2, 2, 3), draw(1, 1, 2, 12)
    channels, kernels = draw(1, 3, 8), draw(1, 2, 8)
    sizes = [draw(1, 5, 9) for _ in range(dims)]
    taps = [draw(1, 3) for _ in range(dims)]
    return ca.ConvProblem(
        op, (draw(1, 4, 40), groups * channels, *sizes), (groups * kernels, channels, *taps),
        stride=draw(1, 2), padding=1, groups=groups, dtype=dtype,
    )  # fmt: skip


@pytest.mark.basic(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_an_engine_at_a_fifth_of_the_tolerance_passes_whatever_the_operands(
    op: str, dtype: torch.dtype
) -> None:
    """Its errors are in proportion to the products that it sums, as those of rounded operands are,
    however much these cancel."""
    rng = torch.Generator().manual_seed(OPS.index(op))
    condemned, compared = [], 0
    for number in range(120):
        problem = random_problem(rng, op, dtype)
        tensors, _ = data_of(problem)
        spread = (0.0, 0.5, 1.0)[number % 3]
        for place in READ[op]:
            tensors[place].copy_(uneven(rng, tensors[place], spread))
        right = exact(problem, tensors)
        squared = replace(problem, dtype=torch.float64)
        size = exact(squared, tuple(t.double().square() for t in tensors)).clamp(min=0).sqrt()
        noise = torch.randn(right.shape, generator=rng, dtype=torch.float64)
        output = (right + tolerance(problem) / 5 * size * noise).to(dtype)
        if not bool(output.isfinite().all()):
            continue
        error = error_of(problem, tensors, output, seed=number)
        compared += error is not None
        if is_found(error, problem):
            condemned.append(f"{problem.text} spread {spread}: {error}")
    assert compared > 60
    assert not condemned, "\n".join(condemned)


def as_tf32(tensor: Tensor) -> Tensor:
    """Rounded to ten bits of the mantissa."""
    bits = tensor.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).reshape(tensor.shape)


@pytest.mark.parametrize("op", OPS)
def test_tensor_cores_pass_whatever_the_operands(op: str) -> None:
    rng = torch.Generator().manual_seed(OPS.index(op))
    condemned = []
    for number in range(150):
        problem = random_problem(rng, op, torch.float32)
        tensors, _ = data_of(problem)
        for place in READ[op]:
            tensors[place].copy_(uneven(rng, tensors[place], (0.0, 1.0, 2.0)[number % 3]))
        output = exact(problem, tuple(as_tf32(t) for t in tensors)).float()
        error = error_of(problem, tensors, output)
        if is_found(error, problem):
            condemned.append(f"{problem.text}: {error}")
    assert not condemned, "\n".join(condemned)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_an_unfused_engine_of_a_fused_problem_passes(shift: float, dtype: torch.dtype) -> None:
    """It rounds before it adds the bias and the residual, and few results are left by the ReLU."""
    problem = ca.ConvProblem(
        "fprop", (8, 16, 9, 9), (24, 16, 3, 3), padding=1, dtype=dtype, bias=True, residual=True,
        activation="relu",
    )  # fmt: skip
    for seed in range(20):
        torch.manual_seed(seed)
        x, w, y, bias, residual = telling_operands(problem, "cpu")
        bias.copy_(torch.randn(24) + shift)
        plain = replace(problem, bias=False, residual=False, activation="")
        rounded = reference(plain, x, w).to(dtype)
        output = (rounded + bias[:, None, None] + residual).relu()
        error = error_of(problem, (x, w, y, bias, residual), output)
        assert error is None or error <= tolerance(problem)


# What cannot be told


@pytest.mark.parametrize("op", OPS)
def test_zero_operands_tell_nothing_but_that_an_output_is_wrong(op: str) -> None:
    problem = ca.ConvProblem(op, (2, 8, 9, 9), (8, 8, 3, 3), padding=1, dtype=torch.float16)
    for zero in READ[op]:
        tensors, right = data_of(problem)
        assert is_telling(problem, tensors)
        tensors[zero].zero_()
        assert not is_telling(problem, tensors)
        assert error_of(problem, tensors, torch.zeros_like(right)) is None
        assert is_found(error_of(problem, tensors, right), problem)


@pytest.mark.parametrize("op", OPS)
def test_operands_that_are_nearly_all_zero_tell_nothing(op: str) -> None:
    """As where one image of a batch is padded, or a kernel is not yet trained."""
    problem = ca.ConvProblem(op, (16, 8, 20, 20), (8, 8, 3, 3), padding=1, dtype=torch.float16)
    tensors, _ = data_of(problem)
    first = tensors[READ[op][0]]
    kept = first[:1, :1, :1].clone()
    first.zero_()
    first[:1, :1, :1] = kept
    assert not is_telling(problem, tensors)
    if op != "wgrad":
        assert error_of(problem, tensors, exact(problem, tensors).half()) is None


@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize("op", OPS)
def test_operands_with_many_zeros_tell_all_the_same(op: str, share: float) -> None:
    """As behind a ReLU, or in a pruned layer."""
    problem = ca.ConvProblem(op, (8, 32, 12, 12), (32, 32, 3, 3), padding=1, dtype=torch.float16)
    tensors, _ = data_of(problem)
    for place in READ[op]:
        tensors[place].mul_(torch.rand(tensors[place].shape) < share)
    assert is_telling(problem, tensors)
    right = exact(problem, tensors).half()
    assert error_of(problem, tensors, right) < tolerance(problem)
    assert is_found(error_of(problem, tensors, right, lambda output: output.zero_()), problem)


@pytest.mark.parametrize("what", ["bias", "residual"])
def test_a_zero_bias_or_residual_tells_nothing(what: str) -> None:
    """An engine that does not add it would pass."""
    problem = ca.ConvProblem(
        "fprop", (2, 8, 9, 9), (8, 8, 3, 3), padding=1, dtype=torch.float16, bias=True,
        residual=True, activation="silu",
    )  # fmt: skip
    x, w, y, bias, residual = telling_operands(problem, "cpu")

    def error(of: tuple[Tensor, Tensor]) -> float | None:
        plain = replace(problem, bias=False, residual=False, activation="")
        sums = reference(plain, x, w) + of[0].double()[:, None, None] + of[1].double()
        right = torch.nn.functional.silu(sums).half()
        return error_of(problem, (x, w, y, bias, residual), right)

    assert error((bias, residual)) is not None
    {"bias": bias, "residual": residual}[what].zero_()
    assert error((bias, residual)) is None
    assert not is_telling(problem, (x, w, y, bias, residual))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("op", OPS)
def test_one_number_that_is_not_finite_tells_nothing(op: str, value: float) -> None:
    problem = ca.ConvProblem(op, (2, 8, 9, 9), (8, 8, 3, 3), padding=1, dtype=torch.float16)
    for place in READ[op]:
        tensors, right = data_of(problem)
        tensors[place][0, 3, 1, 1] = value
        assert not is_telling(problem, tensors)
        assert error_of(problem, tensors, right) is None
        assert error_of(problem, tensors, right, lambda output: output.fill_(math.nan)) is None


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_infinities_that_no_output_can_have_are_found_wherever_they_are(
    op: str, dtype: torch.dtype, value: float
) -> None:
    problem = ca.ConvProblem(op, (4, 24, 24, 24), (24, 24, 3, 3), padding=1, dtype=dtype)
    tensors, right = data_of(problem)

    def one(output: Tensor) -> None:
        output[-1, 17, 1, 1] = value

    for spoil in (one, lambda output: output.fill_(value), lambda output: output[1].fill_(value)):
        assert error_of(problem, tensors, right, spoil) == math.inf or is_found(
            error_of(problem, tensors, right, spoil), problem
        )


@pytest.mark.parametrize("op", OPS)
def test_an_overflow_of_the_outputs_type(op: str) -> None:
    """Infinity of the right sign is right, of which nothing is recorded; all else is wrong."""
    problem = ca.ConvProblem(op, (2, 8, 6, 6), (8, 8, 3, 3), padding=1, dtype=torch.float16)
    tensors, _ = data_of(problem)
    for place in READ[op]:
        tensors[place].mul_(2000)
    right = exact(problem, tensors).half()
    assert bool(right.isinf().any())
    assert error_of(problem, tensors, right) is None
    for spoil in (
        lambda output: output.neg_(),
        lambda output: output.zero_(),
        lambda output: output.fill_(math.inf),
        lambda output: output.fill_(math.nan),
    ):
        assert is_found(error_of(problem, tensors, right, spoil), problem)


@pytest.mark.parametrize("op", OPS)
def test_an_output_of_the_largest_numbers_is_compared(op: str) -> None:
    """A right engine may round to infinity what another rounds to the largest number."""
    problem = ca.ConvProblem(op, (2, 8, 6, 6), (8, 8, 3, 3), padding=1, dtype=torch.float16)
    tensors, _ = data_of(problem)
    a, b = (tensors[place] for place in READ[op])
    scale = math.sqrt(65504 / float(exact(problem, tensors).abs().max()))
    a.mul_(scale)
    b.mul_(scale)
    right = exact(problem, tensors)
    most = float(right.abs().max())
    assert 60000 < most < 70000
    output = right.half()
    output[right.abs() > 0.999 * most] *= 2  # to infinity
    assert error_of(problem, tensors, output) is None


@pytest.mark.basic(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_random_operands_always_tell(op: str, dtype: torch.dtype) -> None:
    shapes = [
        ((2, 16, 9, 9), (8, 16, 3, 3), {"padding": 1}),
        ((1, 1, 1), (1, 1, 1), {}),
        ((3, 12, 9), (12, 1, 3), {"groups": 12, "stride": 2}),
        ((2, 8, 5, 6, 4), (8, 8, 1, 1, 1), {"stride": 2, "bias": True, "residual": True}),
        ((2, 64, 70, 70), (4, 64, 5, 5), {"padding": 2}),
    ]
    for input_shape, weight_shape, more in shapes:
        changes: dict[str, Any] = dict(more)
        if op != "fprop":
            changes = {k: v for k, v in changes.items() if k not in ("bias", "residual")}
        problem = ca.ConvProblem(op, input_shape, weight_shape, dtype=dtype, **changes)
        tensors = telling_operands(problem, "cpu")
        assert is_telling(problem, tensors)
        plain = replace(problem, bias=False, residual=False)
        right = exact(plain, tensors)
        assert 0.1 < float(right.std(correction=0) if right.numel() > 9 else right.abs().max()) < 6
        for added in tensors[3:]:
            right = right + (added[:, None, None, None] if added.dim() == 1 else added).double()
        assert error_of(problem, tensors, right.to(dtype)) <= tolerance(problem)
        wrong = error_of(problem, tensors, right.to(dtype), lambda output: output.mul_(1.3))
        assert is_found(wrong, problem)
