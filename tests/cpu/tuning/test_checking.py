"""The check of a choice's output, on the CPU: right ones pass, every kind of wrong one shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conv.op_cases import CASES
from support.conv.references import random_operands, reference
from support.processes.subprocesses import evaluate_forked
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_autotune as ca
from cudnn_autotune.tuning.checking import error_in, relative_error, tolerance

OPS = ("fprop", "dgrad", "wgrad")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What rounding the output (and summing in float32) leaves.
# A gradient of one or two numbers may be the small difference of large sums.
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}

Tensors = tuple[Tensor, Tensor, Tensor]


def tensors_of(problem: ca.ConvProblem) -> tuple[Tensors, Tensor, Tensor]:
    """(x, w, y); the one that the operation writes; and what it must become, in the dtype."""
    a, b = random_operands(problem)
    right = reference(problem, a, b).to(problem.dtype)
    right = right.contiguous(memory_format=problem.memory_format)
    written = torch.zeros_like(right)
    tensors = {"fprop": (a, b, written), "dgrad": (written, b, a), "wgrad": (b, written, a)}
    return tensors[problem.op], written, right


def error_with(
    output: Tensor, problem: ca.ConvProblem, written: Tensor, tensors: Sequence[Tensor]
) -> float:
    """The relative error that is found where an engine computes ``output``."""
    error = relative_error(problem, lambda: written.copy_(output), *tensors)
    assert error is not None
    return error


def error_of(
    problem: ca.ConvProblem, spoil: Callable[[Tensor], None] = lambda output: None
) -> float | None:
    """The error that is found where the output is right but for what ``spoil`` does to it."""
    tensors, written, right = tensors_of(problem)

    def run() -> None:
        assert bool(written.isnan().all()), "the buffer was not poisoned"
        written.copy_(right)
        spoil(written)

    return relative_error(problem, run, *tensors)


@st.composite
def problems(draw: st.DrawFn, ops: tuple[str, ...] = OPS) -> ca.ConvProblem:
    n = draw(st.integers(1, 3))

    def each(least: int, most: int, count: int = n) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, kernels = draw(st.sampled_from([1, 3, 5])), draw(st.sampled_from([1, 2, 4]))
    layouts = {2: torch.channels_last, 3: torch.channels_last_3d}
    plain = torch.contiguous_format
    return ca.ConvProblem(
        draw(st.sampled_from(ops)),
        (draw(st.integers(1, 3)), groups * channels, *each(5, 9)),
        (groups * kernels, channels, *each(1, 3)),
        stride=each(1, 3),
        padding=each(0, 2, 2 * n),
        dilation=each(1, 2),
        groups=groups,
        dtype=draw(st.sampled_from(DTYPES)),
        memory_format=draw(st.sampled_from([plain, layouts.get(n, plain)])),
    )


@settings(max_examples=2 * settings.default.max_examples)
@given(problem=problems())
def test_right_outputs_pass(problem: ca.ConvProblem) -> None:
    assert error_of(problem) <= ROUNDING[problem.dtype]
    assert ROUNDING[problem.dtype] < tolerance(problem) / 5


@given(problem=problems(), factor=st.sampled_from([0.0, -1.0, 1.2]))
def test_an_output_of_another_size_or_sign_shows(problem: ca.ConvProblem, factor: float) -> None:
    def spoil(output: Tensor) -> None:
        output.mul_(factor)

    error = error_of(problem, spoil)
    assert error == pytest.approx(abs(factor - 1), rel=0.1)
    assert error > tolerance(problem)


@given(problem=problems(("fprop", "dgrad")), data=st.data())
def test_a_wrong_value_at_a_corner_shows(problem: ca.ConvProblem, data: st.DataObject) -> None:
    """Corners are where padding shows, and all of them are looked at, in every channel."""
    shape = problem.output_shape if problem.op == "fprop" else problem.input_shape
    ends = [(0, size - 1) for size in (shape[0], *shape[2:])]
    batch, *place = (data.draw(st.sampled_from(pair)) for pair in ends)
    channel = data.draw(st.integers(0, shape[1] - 1))

    def spoil(output: Tensor) -> None:
        output[(batch, channel, *place)] += 100

    assert error_of(problem, spoil) > tolerance(problem) > error_of(problem)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tap", range(9))
def test_a_wrong_tap_of_a_weights_gradient_shows(tap: int, dtype: torch.dtype) -> None:
    problem = ca.ConvProblem("wgrad", (2, 6, 9, 8), (4, 3, 3, 3), padding=1, groups=2, dtype=dtype)

    def spoil(output: Tensor) -> None:
        output[:, :, tap // 3, tap % 3] = 0

    assert error_of(problem, spoil) > tolerance(problem)


@pytest.mark.parametrize("op", OPS)
def test_elements_that_are_left_out_show_wherever_they_are(op: str) -> None:
    """The sample has not all of a large output, but NaN is looked for in the whole of it."""
    problem = ca.ConvProblem(op, (4, 40, 24, 24), (48, 40, 3, 3), padding=1)
    generator = torch.Generator().manual_seed(0)
    size = tensors_of(problem)[1].numel()
    for index in torch.randint(size, (8,), generator=generator).tolist():

        def spoil(output: Tensor, index: int = index) -> None:
            output.view(-1)[index] = math.nan

        assert error_of(problem, spoil) == math.inf
    assert error_of(problem) is not None


@pytest.mark.parametrize("op", OPS)
def test_an_output_that_is_not_written_shows(op: str) -> None:
    problem = ca.ConvProblem(op, **GEOMETRY)
    tensors, written, _ = tensors_of(problem)
    assert relative_error(problem, lambda: None, *tensors) == math.inf
    assert bool(written.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_whole_output_is_looked_at_where_it_lies(
    memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    """Some of torch's reductions would copy a tensor that is not contiguous."""
    shapes = ((2, 8, 7, 6), (16, 8, 3, 3))
    problem = ca.ConvProblem("fprop", *shapes, dtype=dtype, memory_format=memory_format)
    tensors, written, right = tensors_of(problem)
    copied = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.ops.aten.clone.default:
                copied.append(args[0].data_ptr())
            return function(*args, **(kwargs or {}))

    for index in (0, 1, -1):
        written.copy_(right)
        written[index, index, index, index] = math.nan
        with Copies():
            found = ca._C.compare_output(problem.native(), list(tensors), 0)
        assert error_in(problem, found) == math.inf
    assert written.data_ptr() not in copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1e-15, 1e15])
@pytest.mark.parametrize("op", OPS)
def test_numbers_whose_squares_float32_does_not_hold(
    op: str, scale: float, dtype: torch.dtype
) -> None:
    problem = ca.ConvProblem(op, (2, 4, 6, 6), (6, 4, 3, 3), padding=1, dtype=dtype)
    tensors, written, right = tensors_of(problem)
    for tensor in tensors:
        tensor.mul_(scale)
    right = right.double().mul(scale**2).to(dtype)
    assert error_with(right, problem, written, tensors) < tolerance(problem) / 5
    wrong = relative_error(problem, lambda: written.copy_(right).mul_(1.5), *tensors)
    assert wrong == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("scale", [1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("op", OPS)
def test_numbers_near_the_least_of_float16(op: str, scale: float) -> None:
    """As gradients without a loss scale are: rounding alone is a large part of them."""
    problem = ca.ConvProblem(op, (4, 16, 12, 12), (24, 16, 3, 3), padding=1, dtype=torch.float16)
    tensors, written, _ = tensors_of(problem)
    x, w, y = tensors
    a, b = {"fprop": (x, w), "dgrad": (y, w), "wgrad": (y, x)}[op]
    share = math.sqrt(scale / float(reference(problem, a, b).std()))
    a.mul_(share)
    b.mul_(share)
    exact = reference(problem, a, b)
    right = exact.to(problem.dtype)
    assert float((right.double() - exact).norm() / exact.norm()) > 1e-3
    assert error_with(right, problem, written, tensors) < tolerance(problem) / 5
    for wrong in (torch.zeros_like(right), right * 2, right.roll(1, 0)):
        error = relative_error(problem, lambda wrong=wrong: written.copy_(wrong), *tensors)
        assert error > 10 * tolerance(problem)


# Where tensors lie in memory


def with_gaps(tensor: Tensor) -> Tensor:
    """A copy inside of a larger tensor, with NaN around it in every dimension."""
    room = tensor.new_full([size + 3 for size in tensor.shape], math.nan)
    return room[tuple(slice(1, size + 1) for size in tensor.shape)].copy_(tensor)


def in_another_order(tensor: Tensor) -> Tensor:
    """A copy whose first dimension varies fastest."""
    return tensor.movedim(0, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 0)


def with_odd_strides(tensor: Tensor) -> Tensor:
    """A copy whose dimensions of size one have strides that lead out of its memory."""
    copy = tensor.clone()
    strides = [
        10**6 + d if size == 1 else stride
        for d, (size, stride) in enumerate(zip(copy.shape, copy.stride(), strict=True))
    ]
    return copy.as_strided(copy.shape, strides)


@given(problem=problems(), data=st.data())
def test_tensors_lie_anywhere(problem: ca.ConvProblem, data: st.DataObject) -> None:
    layouts = st.sampled_from([with_gaps, in_another_order, with_odd_strides])
    tensors, _, right = tensors_of(problem)
    x, w, y = (data.draw(layouts)(tensor) for tensor in tensors)
    written = {"fprop": y, "dgrad": x, "wgrad": w}[problem.op]
    error = relative_error(problem, lambda: written.copy_(right), x, w, y)
    assert error <= ROUNDING[problem.dtype]

    def run() -> None:
        written.copy_(right)
        written[(-1,) * written.dim()] += 100

    assert relative_error(problem, run, x, w, y) > tolerance(problem)


@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("expanded", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_an_operand_may_be_expanded(op: str, expanded: int, dim: int) -> None:
    """Its stride is zero in a dimension, as that of the gradient of a sum is in all."""
    problem = ca.ConvProblem(op, **{**GEOMETRY, "dtype": torch.float64})
    operands = list(random_operands(problem))
    whole = operands[expanded]
    operands[expanded] = whole.narrow(dim, 0, 1).expand_as(whole)
    assert operands[expanded].stride(dim) == 0
    a, b = operands
    right = reference(problem, a, b)
    written = torch.zeros_like(right)
    x, w, y = {"fprop": (a, b, written), "dgrad": (written, b, a), "wgrad": (b, written, a)}[op]
    error = relative_error(problem, lambda: written.copy_(right), x, w, y)
    assert error < ROUNDING[torch.float64]
    wrong = relative_error(problem, lambda: written.copy_(right)[0].mul_(1.1), x, w, y)
    assert wrong > tolerance(problem)


@pytest.mark.parametrize("layout", [with_gaps, in_another_order])
def test_a_residual_lies_anywhere(layout: Callable[[Tensor], Tensor]) -> None:
    problem = ca.ConvProblem(
        "fprop", **{**GEOMETRY, "dtype": torch.float64}, bias=True, residual=True, activation="silu"
    )
    (x, w, y), _, right = tensors_of(problem)
    bias, residual = torch.randn(y.shape[1]).double(), torch.randn(y.shape).double()
    right = torch.nn.functional.silu(right + bias[:, None, None] + residual)
    added = (bias, layout(residual))
    error = relative_error(problem, lambda: y.copy_(right), x, w, y, *added)
    assert error < ROUNDING[torch.float64]
    added = (bias, layout(residual.flip(0)))
    assert relative_error(problem, lambda: y.copy_(right), x, w, y, *added) > 0.1


# Mistakes of an engine: it computes another problem of the same shapes.

GEOMETRY: dict[str, Any] = {
    "input_shape": (2, 8, 13, 12),
    "weight_shape": (12, 4, 3, 3),
    "stride": (2, 1),
    "padding": (1, 0, 0, 2),
    "dilation": (1, 2),
    "groups": 2,
    "dtype": torch.float32,
}
DILATED = {"input_shape": (2, 4, 12, 12), "weight_shape": (6, 4, 3, 3)}
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding swapped": (GEOMETRY, {"padding": (0, 2, 1, 0)}),
    # Two of cuDNN's engines pad after as they do before.
    "padding as before": (GEOMETRY, {"padding": (0, 1, 1, 1)}),
    "no dilation": ({**DILATED, "padding": 3, "dilation": 2}, {"padding": 2, "dilation": 1}),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_another_problem_of_the_same_shapes_shows(mistake: str, op: str) -> None:
    fields, changes = MISTAKES[mistake]
    problem = ca.ConvProblem(op, **fields)
    other = ca.ConvProblem(op, **{**fields, **changes})
    assert other.output_shape == problem.output_shape
    tensors, written, _ = tensors_of(problem)
    wrong = tensors_of(other)[2]
    assert error_with(wrong, problem, written, tensors) > 10 * tolerance(problem)


@pytest.mark.parametrize("op", OPS)
def test_ignored_padding_shows(op: str) -> None:
    """The border of the input taken for zeros, or the other way round."""
    same = {"input_shape": (2, 4, 8, 8), "weight_shape": (6, 4, 3, 3), "padding": 1}
    problem = ca.ConvProblem(op, **same)
    tensors, written, right = tensors_of(problem)
    x, w, y = (t.clone() for t in tensors)
    for border in (x[:, :, 0], x[:, :, -1], x[:, :, :, 0], x[:, :, :, -1]):
        border.zero_()
    if op == "fprop":
        wrong = torch.nn.functional.conv2d(x, w, padding=1)
    elif op == "dgrad":
        wrong = right.clone()
        wrong[:, :, 0] = 0
    else:
        wrong = reference(problem, y, x).float()
    assert error_with(wrong, problem, written, tensors) > 10 * tolerance(problem)


@pytest.mark.parametrize("op", OPS)
def test_swapped_groups_show(op: str) -> None:
    problem = ca.ConvProblem(op, **GEOMETRY)
    tensors, written, right = tensors_of(problem)
    dim = 0 if op == "wgrad" else 1
    assert error_with(right.roll(right.shape[dim] // 2, dim), problem, written, tensors) > 1


@pytest.mark.parametrize("op", OPS)
def test_a_flipped_kernel_shows(op: str) -> None:
    problem = ca.ConvProblem(op, **GEOMETRY)
    tensors, written, right = tensors_of(problem)
    a, b = random_operands(problem)
    wrong = right.flip(2, 3) if op == "wgrad" else reference(problem, a, b.flip(2, 3))
    assert error_with(wrong, problem, written, tensors) > 10 * tolerance(problem)


# Where nothing can be said, and what is the caller's own


@pytest.mark.parametrize("op", OPS)
def test_one_operand_that_is_not_finite_allows_no_check_wherever_it_is(op: str) -> None:
    """NaN that the sample does not meet is in the output all the same."""
    problem = ca.ConvProblem(op, (8, 8, 40, 40), (8, 8, 3, 3), padding=1)

    def error(place: tuple[int, ...]) -> float | None:
        tensors, written, _ = tensors_of(problem)
        x, w, y = tensors
        a, b = {"fprop": (x, w), "dgrad": (y, w), "wgrad": (y, x)}[op]
        a[place] = math.nan
        right = reference(problem, a, b)
        assert bool(right.isnan().any())
        assert not bool(right.isnan().all())
        return relative_error(problem, lambda: written.copy_(right), *tensors)

    places = [(1, 7, 11, 13), (2, 3, 9, 17), (3, 5, 24, 5), (6, 1, 31, 30), (5, 0, 20, 36)]
    assert list(map(error, places)) == [None] * len(places)


def test_want_of_memory_allows_no_check_and_other_errors_reach_the_caller() -> None:
    problem = ca.ConvProblem("fprop", (1, 4, 6, 6), (4, 4, 3, 3))
    tensors, _, _ = tensors_of(problem)

    def fail() -> None:
        raise error

    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    assert relative_error(problem, fail, *tensors) is None
    error = RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="launch failure"):
        relative_error(problem, fail, *tensors)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("op", OPS)
def test_without_cublas_too(name: str, op: str) -> None:
    """Where torch wants determinism it refuses cuBLAS: the reference is summed without it."""
    case = CASES[name]
    problem = ca.ConvProblem(
        op,
        case.input_shape,
        case.weight_shape,
        case.stride,
        case.both_sides,
        case.dilation,
        case.groups,
        dtype=torch.float64,
    )

    def spoil(output: Tensor) -> None:
        output.view(-1)[0] += 1

    torch.use_deterministic_algorithms(True)
    right, wrong = error_of(problem), error_of(problem, spoil)
    assert right < 1e-14 < 1e-3 < wrong


@pytest.mark.parametrize("op", OPS)
def test_operands_are_left_alone_and_a_seed_fixes_the_sample(op: str) -> None:
    problem = ca.ConvProblem(op, (4, 40, 24, 24), (48, 40, 3, 3), padding=1, dtype=torch.float16)
    tensors, written, right = tensors_of(problem)
    copies = [t.clone() for t in tensors]
    before = torch.get_rng_state()
    run = partial(written.copy_, right)
    errors = {relative_error(problem, run, *tensors, seed=5) for _ in range(2)}
    assert len(errors) == 1
    assert torch.equal(torch.get_rng_state(), before)
    for now, then in zip(tensors, copies, strict=True):
        assert now is written or torch.equal(now, then)
    assert torch.equal(written, right)


@pytest.mark.parametrize("kernels", [512, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_default_type_that_is_narrow_does_no_harm(dtype: torch.dtype, kernels: int) -> None:
    problem = ca.ConvProblem("wgrad", (2, 4, 6, 6), (kernels, 4, 3, 3))
    torch.set_default_dtype(dtype)
    try:
        assert error_of(problem) == pytest.approx(0.0, abs=ROUNDING[torch.float32])
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_a_default_device_and_inference_mode_do_no_harm(op: str) -> None:
    problem = ca.ConvProblem(op, (2, 4, 6, 6), (6, 4, 3, 3))
    tensors, written, right = tensors_of(problem)
    run = partial(written.copy_, right)
    with torch.device("meta"):
        error = relative_error(problem, run, *tensors, seed=5)
    with torch.inference_mode():
        assert relative_error(problem, run, *tensors, seed=5) == error
    assert error == pytest.approx(0.0, abs=ROUNDING[torch.float32])


NEWER_SWITCH = """
import torch
import cudnn_autotune as ca
from cudnn_autotune.tuning.checking import relative_error

{scope}.fp32_precision = "tf32"
for op in ("fprop", "dgrad", "wgrad"):
    for dtype in (torch.float16, torch.float32):
        problem = ca.ConvProblem(op, (2, 4, 6, 6), (6, 4, 3, 3), dtype=dtype)
        tensors = [torch.ones(shape, dtype=dtype) for shape in ((2, 4, 6, 6), (6, 4, 3, 3),
                                                                 (2, 6, 4, 4))]
        written = tensors["fprop dgrad wgrad".split().index(op) - 1]
        print(relative_error(problem, lambda: written.zero_(), *tensors))
"""


@pytest.mark.parametrize("scope", ["torch.backends", "torch.backends.cuda.matmul"])
def test_however_tf32_is_switched_on(scope: str) -> None:
    """By the newer of PyTorch's two names; to read the older one is an error from then on."""
    assert evaluate_forked(NEWER_SWITCH.format(scope=scope)).split() == ["1.0"] * 6


def test_tolerances() -> None:
    shapes = ((1, 4, 6, 6), (4, 4, 3, 3))
    for dtype in DTYPES:
        allowed = tolerance(ca.ConvProblem("fprop", *shapes, dtype=dtype, allow_tf32=False))
        assert torch.finfo(dtype).eps < allowed < 0.1
    loose = tolerance(ca.ConvProblem("fprop", *shapes, allow_tf32=True))
    assert loose > tolerance(ca.ConvProblem("fprop", *shapes, allow_tf32=False))
