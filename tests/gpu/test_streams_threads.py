"""Streams and threads: the result is there when the stream is; threads do not mix."""

from __future__ import annotations

import pytest
import torch
from support.conv.references import assert_close
from support.conv.small_layer import expected, operands
from support.processes.threads import in_threads

import cudnn_autotune as ca

MODES = ["heuristic", "sample_once", "auto"]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_side_stream(mode: str, warm: bool) -> None:
    """The input is written late, on the side stream: work on any other stream reads zeros."""
    input, weight = operands()
    right = expected(input, weight)
    if warm:
        ca.functional.conv2d(torch.zeros_like(input), weight, sampling=mode)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(input)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(input)
        output = ca.functional.conv2d(late, weight, sampling=mode)
        late.zero_()  # and what follows on the stream does not overtake it
    stream.synchronize()
    assert_close(output, right, 2e-3)


def test_backward_runs_on_the_forwards_stream() -> None:
    input, weight = operands()
    input.requires_grad_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        output = ca.functional.conv2d(input, weight, sampling="sample_once")
        seed = torch.zeros_like(output)
        torch.cuda._sleep(50_000_000)
        seed.fill_(1)
        (grad,) = torch.autograd.grad(output, input, seed)
    stream.synchronize()
    exact = input.detach().cpu().double().requires_grad_()
    value = torch.nn.functional.conv2d(exact, weight.cpu().double())
    (right,) = torch.autograd.grad(value.sum(), exact)
    assert_close(grad, right, 2e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shapes", ["same", "different"])
def test_many_threads_at_once(shapes: str, mode: str) -> None:
    count = 8
    batches = [4 if shapes == "same" else 1 + i for i in range(count)]
    inputs = [operands(batch, seed=i) for i, batch in enumerate(batches)]
    right = [expected(*pair) for pair in inputs]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                output = ca.functional.conv2d(*inputs[index], sampling=mode)
            torch.cuda.current_stream().synchronize()
        assert_close(output, right[index], 2e-3)

    in_threads(count, work)
    assert len(ca.choices()) == len(set(batches))


def test_threads_forget_while_others_run() -> None:
    pairs = [operands(batch) for batch in (1, 2, 3, 4)]
    right = [expected(*pair) for pair in pairs]
    torch.cuda.synchronize()

    def work(index: int) -> None:
        for _ in range(20):
            if index == 0:
                ca.forget()
                ca.choices()
                continue
            output = ca.functional.conv2d(*pairs[index], sampling="heuristic")
            assert_close(output, right[index], 2e-3)

    in_threads(4, work)
