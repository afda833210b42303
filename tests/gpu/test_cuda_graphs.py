"""Capture: nothing is timed or synchronised while a stream captures, and replays are right."""

from __future__ import annotations

import gc

import pytest
import torch
from support.conv.references import assert_close, random_operands, reference
from support.conv.small_layer import expected, operands
from torch import Tensor

import cudnn_autotune as ca


def choices_of(sampling: str) -> list[ca.Choice]:
    return [c for c in ca.choices() if c.sampling == sampling and c.time_ms is not None]


def check_replays(graph: torch.cuda.CUDAGraph, input: Tensor, weight: Tensor, out: Tensor) -> None:
    for seed in (1, 2):
        input.copy_(operands(seed=seed)[0])
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, expected(input, weight), 2e-3)


@pytest.fixture(params=["auto", "till_stable", "sample_once", "heuristic"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_warm_capture(mode: str) -> None:
    input, weight = operands()
    ca.functional.conv2d(input, weight, sampling=mode)
    before = ca.choices()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ca.functional.conv2d(input, weight, sampling=mode)
    assert ca.choices() == before
    check_replays(graph, input, weight, output)


def test_cold_capture_neither_tunes_nor_fails(mode: str) -> None:
    input, weight = operands()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ca.functional.conv2d(input, weight, sampling=mode)
    assert not choices_of(mode)
    check_replays(graph, input, weight, output)
    # The heuristic's plan of the capture is no decision: the next eager call tunes.
    again = ca.functional.conv2d(input, weight, sampling=mode)
    assert_close(again, expected(input, weight), 2e-3)
    if mode != "heuristic":
        assert len(choices_of(mode)) == 1
    check_replays(graph, input, weight, output)


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_spectra_of_long_filters_are_captured(op: str) -> None:
    """cuFFT has planned the transforms before."""
    problem = ca.ConvProblem(
        op, (2, 64, 4096), (64, 1, 1025), padding=512, groups=64, dtype=torch.float16
    )
    (text,) = (c.text for c in ca.expert.candidates(problem) if c.id.name == "fft")
    a, b = random_operands(problem, "cuda")
    ca.expert.execute(problem, text, a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ca.expert.execute(problem, text, a, b)
    for factor in (2, -1):
        a.mul_(factor)
        output.fill_(float("nan"))
        graph.replay()
        assert_close(output, reference(problem, a, b), 2e-3)


def test_a_graph_outlives_the_plan_that_it_captured(mode: str) -> None:
    """Kernels that are compiled at run time may be unloaded with their plan."""
    before = ca._C.plan_cache_capacity()
    ca._C.set_plan_cache_capacity(1)
    try:
        input, weight = operands()
        ca.functional.conv2d(input, weight, sampling=mode)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = ca.functional.conv2d(input, weight, sampling=mode)
        ca.forget()
        for batch in (1, 2, 3):
            ca.functional.conv2d(input[:batch], weight, sampling="heuristic")
        gc.collect()
        check_replays(graph, input, weight, output)
    finally:
        ca._C.set_plan_cache_capacity(before)


def test_capture_on_another_thread_does_not_stop_tuning_here() -> None:
    """A capture in thread-local mode on one stream; this thread's other stream tunes."""
    input, weight = operands()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    held = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="relaxed")
        held.add_(1)
        with torch.cuda.stream(torch.cuda.default_stream()):
            output = ca.functional.conv2d(input, weight, sampling="heuristic")
        graph.capture_end()
    assert_close(output, expected(input, weight), 2e-3)
    graph.replay()
    torch.cuda.synchronize()
    assert held.tolist() == [1] * 8


@pytest.mark.parametrize("warm", [True, False])
def test_training_step(warm: bool) -> None:
    """Forward and backward in one graph; the workspace comes from the graph's own pool."""
    layer = ca.Conv2d(16, 24, 3, device="cuda", dtype=torch.float16, sampling="sample_once")
    input = operands()[0].requires_grad_()
    if warm:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                layer(input).square().mean().backward()
        torch.cuda.current_stream().wait_stream(stream)
    else:
        # Only the shape is cold: no thread can create its handle of cuDNN under a capture, for
        # PyTorch's convolutions no more than for ours.
        other = ca.Conv2d(8, 8, 3, device="cuda", dtype=torch.float16, sampling="heuristic")
        other(torch.randn(1, 8, 9, 9, device="cuda", dtype=torch.float16)).sum().backward()
    layer.zero_grad(set_to_none=True)
    input.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(input).float().square().mean().backward()
    graph.replay()
    torch.cuda.synchronize()
    exact = torch.nn.Conv2d(16, 24, 3, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    copy = input.detach().cpu().double().requires_grad_()
    exact(copy).square().mean().backward()
    for mine, right in zip(
        [input.grad, layer.weight.grad, layer.bias.grad],
        [copy.grad, exact.weight.grad, exact.bias.grad],
        strict=True,
    ):
        assert_close(mine, right, 1e-2)


def test_memory_reused_after_capture_is_not_overwritten_by_a_replay() -> None:
    """The workspace of a captured plan must stay the graph's."""
    input, weight = operands()
    ca.functional.conv2d(input, weight, sampling="sample_once")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ca.functional.conv2d(input, weight, sampling="sample_once")
    guards = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(32)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(bool((guard == 7).all()) for guard in guards)
    assert_close(output, expected(input, weight), 2e-3)
