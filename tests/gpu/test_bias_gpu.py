"""Layers with a bias on a GPU: one problem, served by a fused engine, an unfused one or PyTorch."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import CONVOLUTIONS, assert_close, relative_error, tolerance
from support.conv.training_steps import assert_same_step, twin_layers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import cudnn_autotune as ca
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem

# Arguments of a convolution, by name: the input, the weight, and keywords.
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((4, 64, 28, 28), (64, 64, 3, 3), {"padding": 1}),
    "1x1": ((4, 64, 28, 28), (128, 64, 1, 1), {}),
    "strided": ((4, 32, 29, 28), (48, 32, 3, 3), {"stride": 2, "padding": 1}),
    "dilated": ((4, 16, 20, 18), (24, 16, 3, 3), {"dilation": 2}),
    "grouped": ((4, 64, 14, 14), (64, 16, 3, 3), {"padding": 1, "groups": 4}),
    "depthwise": ((4, 64, 14, 14), (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    "same": ((4, 32, 28, 27), (32, 32, 4, 4), {"padding": "same"}),
    "odd channels": ((2, 7, 11, 13), (5, 7, 3, 3), {}),
    "one place": ((3, 16, 1, 1), (8, 16, 1, 1), {}),
    "1d": ((4, 32, 100), (48, 32, 5), {"padding": 2, "stride": 2}),
    "1d pointwise": ((4, 32, 100), (48, 32, 1), {}),
    "3d": ((2, 16, 9, 10, 8), (24, 16, 3, 3, 3), {"padding": 1}),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PROBLEM = ConvProblem(
    "fprop",
    (4, 64, 28, 28),
    (64, 64, 3, 3),
    padding=1,
    dtype=torch.float16,
    memory_format=torch.channels_last,
    bias=True,
)


def tensors(name: str, dtype: torch.dtype, channels_last: bool = False) -> tuple[Tensor, ...]:
    input_shape, weight_shape, _ = LAYERS[name]
    layout = torch.contiguous_format
    if channels_last:
        layout = CHANNELS_LAST[len(input_shape) - 2]
    x = torch.randn(input_shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    w = torch.randn(weight_shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    return x, w, 3 * torch.randn(weight_shape[0], device="cuda").to(dtype)


def call(name: str, *given: Tensor, **policy: Any) -> Tensor:
    dims = given[0].dim() - 2
    convolution = getattr(ca.functional, f"conv{dims}d")
    output: Tensor = convolution(*given, **LAYERS[name][2], **policy)
    return output


def expected(name: str, *given: Tensor) -> Tensor:
    dims = given[0].dim() - 2
    return CONVOLUTIONS[dims](*(t.cpu().double() for t in given), **LAYERS[name][2])


def fprops() -> list[ca.Choice]:
    return [choice for choice in ca.choices() if choice.problem.op == "fprop"]


def layouts(name: str) -> list[bool]:
    return [False, True] if len(LAYERS[name][0]) - 2 in CHANNELS_LAST else [False]


CASES = [(name, last) for name in LAYERS for last in layouts(name)]


# Outputs and gradients


@pytest.mark.parametrize("mode", ["heuristic", "race"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "channels_last"), CASES)
def test_outputs(name: str, channels_last: bool, dtype: torch.dtype, mode: str) -> None:
    given = tensors(name, dtype, channels_last)
    theirs = CONVOLUTIONS[given[0].dim() - 2](*given, **LAYERS[name][2])
    right, allowed = expected(name, *given), tolerance(dtype, allow_tf32=True)
    for _ in range(2):
        output = call(name, *given, sampling=mode)
        assert_close(output, right, allowed, name)
        assert output.stride() == theirs.stride()
    (choice,) = fprops()
    assert choice.problem.bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "channels_last"), CASES)
def test_every_candidate_is_right(name: str, channels_last: bool, dtype: torch.dtype) -> None:
    """Of those that are compiled at run time, the first two of each engine."""
    given = tensors(name, dtype, channels_last)
    right = expected(name, *given)
    call(name, *given, sampling="heuristic")
    problem = fprops()[0].problem
    wrong, ran, compiled = [], Counter[bool](), Counter[str]()
    for candidate in ca.expert.candidates(problem, device="cuda"):
        compiled[candidate.engine_name] += candidate.is_compiled
        if compiled[candidate.engine_name] > 2:
            continue
        try:
            output = ca.expert.execute(problem, candidate.text, *given)
        except ca.CudnnError:
            continue
        ran[candidate.is_unfused] += 1
        error = relative_error(output, right)
        if not error <= tolerance(dtype, problem.allow_tf32):
            wrong.append(f"{candidate.text} {candidate.notes}: relative error {error:.3g}")
    assert not wrong, "\n".join([problem.text, *wrong])
    assert ran[True] > 0
    print(f"{problem.text}: {ran[False]} fused and {ran[True]} unfused ran")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "shape", "arguments"),
    [
        ("Conv1d", (4, 16, 60), (16, 24, 3)),
        ("Conv2d", (4, 16, 20, 18), (16, 24, 3)),
        ("Conv2d", (4, 16, 20, 18), (16, 24, 1)),
        ("Conv3d", (2, 16, 8, 7, 6), (16, 24, 3)),
    ],
)
def test_gradients(
    kind: str, shape: tuple[int, ...], arguments: tuple[int, ...], dtype: torch.dtype
) -> None:
    theirs, ours = twin_layers(*arguments, kind=kind, dtype=dtype)
    ours.sampling = "sample_once"
    input = torch.randn(shape, device="cuda", dtype=dtype)
    # PyTorch's output is rounded before the bias is added, and ours may be rounded after it.
    assert_same_step(theirs, ours, input, 2 * tolerance(dtype, allow_tf32=True))
    problems = {choice.problem.op: choice.problem for choice in ca.choices()}
    assert {op: problem.bias for op, problem in problems.items()} == {
        "fprop": True,
        "dgrad": False,
        "wgrad": False,
    }


# What may serve


def of_each_kind() -> dict[str, str]:
    runs: dict[str, str] = {"aten": "aten"}
    for candidate in ca.expert.candidates(PROBLEM, device="cuda"):
        runs.setdefault("unfused" if candidate.is_unfused else "fused", candidate.text)
    return runs


@pytest.mark.parametrize(("kind", "kernels_behind"), [("fused", 0), ("unfused", 1), ("aten", 1)])
def test_each_kind_can_be_pinned(kind: str, kernels_behind: int) -> None:
    text = of_each_kind()[kind]
    ca.pin(PROBLEM, text)
    given = tensors("3x3", torch.float16, True)
    right = expected("3x3", *given)
    for _ in range(2):
        assert_close(call("3x3", *given), right, tolerance(torch.float16))
    (choice,) = ca.choices()
    assert (choice.problem, choice.text, choice.origin) == (PROBLEM, text, "pinned")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call("3x3", *given)
    added = sum(event.count for event in profiled.key_averages() if event.key == "aten::add_")
    assert added == kernels_behind


def test_a_matrix_product_adds_the_bias() -> None:
    given = tensors("1x1", torch.float16, True)
    call("1x1", *given, sampling="heuristic")
    problem = ca.choices()[0].problem
    ca.pin(problem, "matmul")
    assert_close(call("1x1", *given), expected("1x1", *given), tolerance(torch.float16))
    assert [choice.text for choice in ca.choices()] == ["matmul"]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call("1x1", *given)
    keys = {event.key for event in profiled.key_averages()}
    assert "aten::addmm" in keys
    assert "aten::add_" not in keys


@pytest.mark.parametrize("which", ["input", "weight", "bias"])
def test_misaligned_tensors_are_not_copied_for_a_fused_engine(which: str) -> None:
    """Fused engines need aligned addresses. The others have a key with their alignment."""
    given = dict(zip(("input", "weight", "bias"), tensors("3x3", torch.float16), strict=True))
    right = expected("3x3", *given.values())
    odd = given[which]
    room = torch.empty(odd.numel() + 1, device="cuda", dtype=odd.dtype)[1:]
    given[which] = room.as_strided(odd.shape, odd.stride(), 1).copy_(odd)
    assert given[which].data_ptr() % 32
    assert_close(call("3x3", *given.values(), sampling="race"), right, tolerance(torch.float16))
    (choice,) = ca.choices()
    assert not choice.problem.bias


# Where the calls come from


@pytest.mark.parametrize("is_warm", [True, False])
def test_in_a_cuda_graph(is_warm: bool) -> None:
    given = tensors("3x3", torch.float16, True)
    if is_warm:
        call("3x3", *given, sampling="race")
    torch.cuda.synchronize()
    before = ca.choices()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call("3x3", *given, sampling="race")
    assert ca.choices() == before
    for _ in range(2):
        given[0].copy_(torch.randn_like(given[0]))
        given[2].copy_(torch.randn_like(given[2]))
        output.fill_(float("nan"))
        graph.replay()
        assert_close(output, expected("3x3", *given), tolerance(torch.float16))
    # The next call outside is served by a choice.
    assert_close(
        call("3x3", *given, sampling="race"), expected("3x3", *given), tolerance(torch.float16)
    )
    assert [choice.problem for choice in ca.choices()] == [PROBLEM]


def test_a_first_call_in_a_capture_runs_what_pytorch_does() -> None:
    """An engine that adds the bias could be wrong, which cannot be checked then."""
    given = tensors("3x3", torch.float16, True)
    F.conv2d(*given, padding=1)  # makes this thread's cuDNN handle
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with profile(activities=[ProfilerActivity.CPU]) as run, torch.cuda.graph(graph):
        call("3x3", *given, sampling="race")
    names = {event.name for event in run.events() or []}
    assert any(name.startswith("cudnn_autotune::unfused:") for name in names)


@pytest.mark.parametrize("channels_last", [False, True])
def test_enabled_for_the_process(channels_last: bool) -> None:
    given = tensors("3x3", torch.float16, channels_last)
    theirs = F.conv2d(*given, padding=1)
    with ca.enable("race"):
        output = F.conv2d(*given, padding=1)
    assert_close(output, expected("3x3", *given), tolerance(torch.float16))
    assert output.stride() == theirs.stride()
    (choice,) = ca.choices()
    assert choice.problem.bias


def test_inductor_still_adds_the_bias() -> None:
    model = nn.Sequential(ca.Conv2d(16, 16, 3, sampling="heuristic"), nn.ReLU()).cuda().eval()
    exact = copy.deepcopy(model).cpu().double()
    x = torch.randn(2, 16, 20, 20, device="cuda")
    with torch.no_grad():
        output = torch.compile(model)(x)
        right = exact(x.cpu().double())
    assert_close(output, right, tolerance(torch.float32, allow_tf32=True))
    assert ca.choices()
    assert not any(choice.problem.bias for choice in ca.choices())
