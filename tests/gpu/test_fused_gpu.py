"""Fused convolutions on a GPU: every engine and every activation against float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.fused_cases import FUNCTIONS
from support.conv.references import expected, relative_error, tolerance, with_epilogue
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.timers.measuring import (
    added_names,
    added_operands,
    operands,
    run_operator,
)

ACTIVATIONS = (*FUNCTIONS, "prelu")

NHWC = torch.channels_last
SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"input_shape": (4, 64, 28, 28), "weight_shape": (64, 64, 3, 3), "padding": 1},
    "1x1": {"input_shape": (4, 64, 28, 28), "weight_shape": (128, 64, 1, 1)},
    "strided": {
        "input_shape": (4, 32, 29, 28), "weight_shape": (48, 32, 3, 3), "stride": 2, "padding": 1,
    },
    "grouped": {
        "input_shape": (4, 64, 14, 14), "weight_shape": (64, 16, 3, 3), "padding": 1, "groups": 4,
    },
    "one place": {"input_shape": (3, 16, 1, 1), "weight_shape": (8, 16, 1, 1)},
    "asymmetric": {
        "input_shape": (4, 32, 28, 28), "weight_shape": (32, 32, 4, 4), "padding": (1, 1, 2, 2),
    },
}  # fmt: skip
TYPES = {
    "fp16_nhwc": {"dtype": torch.float16, "memory_format": NHWC},
    "bf16_nhwc": {"dtype": torch.bfloat16, "memory_format": NHWC},
    "tf32_nchw": {"dtype": torch.float32},
    "fp32_nhwc": {"dtype": torch.float32, "memory_format": NHWC, "allow_tf32": False},
}


def make(shape: str, types: str, activation: str, **added: bool) -> ca.ConvProblem:
    return ca.ConvProblem("fprop", **SHAPES[shape], **TYPES[types], activation=activation, **added)


def reference(problem: ca.ConvProblem, data: tuple[Tensor, ...]) -> Tensor:
    names = ("x", "w", "y", *added_names(problem))
    return expected(problem, {name: t.cpu() for name, t in zip(names, data, strict=True)})


def allowed(problem: ca.ConvProblem) -> float:
    return tolerance(problem.dtype, problem.allow_tf32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", ["3x3", "1x1"])
def test_every_engine_of_a_fused_problem_is_right(shape: str, types: str, activation: str) -> None:
    """Of those that are compiled at run time, the first of each engine; without an activation and
    with ReLU the second, too, whose epilogue is the same."""
    most = 2 if activation in ("", "relu") else 1
    problem = make(
        shape,
        types,
        activation,
        bias=True,
        residual=activation in ("", "relu", "silu", "leaky_relu(0.1)", "prelu"),
    )
    data = operands(problem)
    expected = reference(problem, data)
    x, w, _, *added = data
    compiled = Counter[str]()
    wrong, refused, ran = [], [], 0
    for candidate in ca.expert.candidates(problem, device="cuda"):
        if candidate.is_compiled:
            compiled[candidate.engine_name] += 1
            if compiled[candidate.engine_name] > most:
                continue
        try:
            output = ca.expert.execute(problem, candidate.text, x, w, *added)
        except ca.CudnnError as error:
            refused.append(f"{candidate.text}: {error}")
            continue
        ran += 1
        error = relative_error(output, expected)
        if not error <= allowed(problem):
            wrong.append(f"{candidate.text} {candidate.notes}: relative error {error:.3g}")
    print(f"{problem.text}: {ran} ran, {len(refused)} refused")
    assert not wrong, "\n".join([problem.text, *wrong])
    if activation in ("", "relu"):
        assert ran > 0, "\n".join(refused)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("added", [{"bias": True}, {"residual": True}], ids=str)
def test_the_operator_is_right(shape: str, activation: str, added: dict[str, bool]) -> None:
    ca.set_benchmark_limit(3)
    problem = make(shape, "fp16_nhwc", activation, **added)
    data = operands(problem)
    output = run_operator(problem, data, "sample_once")
    assert relative_error(output, reference(problem, data)) <= allowed(problem)
    assert output.is_contiguous(memory_format=NHWC)


NEW = ["relu6", "tanh", "mish", "leaky_relu(0.1)", "elu(0.7)", "prelu"]
OTHER_DIMS: dict[str, dict[str, Any]] = {
    "1-d as images of height 1": {
        "input_shape": (4, 64, 1, 256), "weight_shape": (64, 64, 1, 7), "padding": (0, 9),
        "dilation": (1, 3), "memory_format": NHWC,
    },
    "1-d": {"input_shape": (4, 64, 256), "weight_shape": (64, 64, 3), "padding": 1},
    "3-d": {
        "input_shape": (2, 32, 6, 14, 14), "weight_shape": (32, 32, 3, 3, 3), "padding": 1,
        "memory_format": torch.channels_last_3d,
    },
}  # fmt: skip


@pytest.mark.parametrize("activation", NEW)
@pytest.mark.parametrize("shape", OTHER_DIMS)
def test_activations_of_other_numbers_of_dimensions(shape: str, activation: str) -> None:
    ca.set_benchmark_limit(3)
    problem = ca.ConvProblem(
        "fprop", **OTHER_DIMS[shape], dtype=torch.float16, bias=True, activation=activation
    )
    data = operands(problem)
    output = run_operator(problem, data, "sample_once")
    assert relative_error(output, reference(problem, data)) <= allowed(problem)


@pytest.mark.parametrize("activation", ["leaky_relu(0.01)", "leaky_relu(3)", "elu(1)", "elu(3)"])
def test_other_parameters(activation: str) -> None:
    """A parameter reaches the engine, also one above 1."""
    ca.set_benchmark_limit(3)
    problem = make("3x3", "fp16_nhwc", activation, bias=True)
    data = operands(problem)
    name, _, parameter = activation.rstrip(")").partition("(")
    function = getattr(torch.nn.functional, name)
    plain = reference(make("3x3", "fp16_nhwc", "", bias=True), data)
    output = run_operator(problem, data, "sample_once")
    assert relative_error(output, function(plain, float(parameter))) <= allowed(problem)


@pytest.mark.parametrize("activation", NEW)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_every_engine_passes_on_what_is_not_finite(value: float, activation: str) -> None:
    problem = make("1x1", "fp16_nhwc", activation, bias=True)
    x, w, _, *added = operands(problem)
    bias, _, slope = added_operands(problem, added)
    assert bias is not None
    w.fill_(1 / w.shape[1])
    x[0, :, 3, 5] = value
    sums = torch.conv2d(x.double(), w.double())
    expected = with_epilogue(problem, sums, bias, None, slope)
    listed = {c.engine_name: c.text for c in ca.expert.candidates(problem, device="cuda")}
    others = {}
    for text in listed.values():
        try:
            found = ca.expert.execute(problem, text, x, w, *added)
        except ca.CudnnError:
            continue
        if not torch.allclose(found.double(), expected, 1e-2, 1e-2, equal_nan=True):
            others[text] = found[0, :2, 3, 5].tolist()
    assert not others, f"expected {expected[0, :2, 3, 5].tolist()}, got {others}"


def test_operands_of_any_layout_and_alignment() -> None:
    problem = make("3x3", "fp16_nhwc", "relu", bias=True, residual=True)
    x, w, y, b, r = operands(problem)
    expected = reference(problem, (x, w, y, b, r))
    shifted_bias = torch.empty(b.numel() + 1, dtype=b.dtype, device="cuda")[1:].copy_(b)
    room = torch.empty(r.numel() + 1, dtype=r.dtype, device="cuda")[1:]
    shifted = room.as_strided(r.shape, r.stride()).copy_(r)
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:]
    shifted_x = room.as_strided(x.shape, x.stride()).copy_(x)
    for given in (
        (x, w, y, shifted_bias, r),
        (x, w, y, b, r.contiguous()),
        (x, w, y, b, shifted),
        (shifted_x, w, y, b, r),
        (x.contiguous(), w, y, b, r),
    ):
        output = run_operator(problem, given, "sample_once")
        assert relative_error(output, expected) <= allowed(problem)


@pytest.mark.parametrize("knows_alone", [False, True])
def test_pytorchs_own_path_is_left_out_only_for_the_time_of_its_convolution(
    knows_alone: bool,
) -> None:
    problem = make("3x3", "fp16_nhwc", "relu", bias=True)
    if knows_alone:
        alone = replace(problem, bias=False, activation="")
        run_operator(alone, operands(alone), "auto")
    data = operands(problem)
    output = run_operator(problem, data, "auto")
    assert relative_error(output, reference(problem, data)) <= allowed(problem)
    choice = next(choice for choice in ca.choices() if choice.problem == problem)
    (aten,) = (one for one in choice.selection.ranking if one.candidate.text == "aten")
    if aten.time_ms is None:
        assert knows_alone
        assert "its convolution alone" in aten.eliminated
        assert choice.text != "aten"


def test_a_fused_convolution_is_captured() -> None:
    problem = make("3x3", "fp16_nhwc", "relu", bias=True, residual=True)
    data = operands(problem)
    run_operator(problem, data, "sample_once")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run_operator(problem, data, "sample_once")
    data[0].copy_(torch.randn_like(data[0]))
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(output, reference(problem, data)) <= allowed(problem)


@pytest.mark.parametrize("shape", ["1x1", "one place"])
def test_a_first_call_in_a_capture_runs_no_engine_unchecked(shape: str) -> None:
    problem = make(shape, "fp16_nhwc", "relu", bias=True)
    data = operands(problem)
    torch.conv2d(*data[:2])  # makes this thread's cuDNN handle
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run_operator(problem, data, "race")
    assert ca.fallbacks() == {"PyTorch's own path was chosen (see choices())": 1}
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(output, reference(problem, data)) <= allowed(problem)
