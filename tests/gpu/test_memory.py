"""Want of memory: another engine, ATen, or an out-of-memory error; never a wrong result."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from support.conv.problems import HEADROOM, HUNGRY
from support.conv.references import TF32_TOLERANCE, assert_close, random_operands, reference
from support.tuning.strategies import HUNGRIEST, ONLY_ATEN
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.timers.measuring import cold_sets, operands


@pytest.fixture(params=["fprop", "dgrad", "wgrad"])
def problem(request: pytest.FixtureRequest) -> ca.ConvProblem:
    problem = ca.ConvProblem(op=request.param, **HUNGRY)
    first, *_ = ca.expert.candidates(problem, device="cuda")
    assert first.workspace_bytes > HEADROOM, "the first engine is not hungry: nothing is tested"
    return problem


def run(problem: ca.ConvProblem, a: Tensor, b: Tensor, sampling: str) -> Tensor:
    geometry = ([1, 1], [1, 1], [1, 1], 1, sampling)
    if problem.op == "fprop":
        return torch.ops.cudnn_autotune.conv_fprop(a, b, None, *geometry)
    if problem.op == "dgrad":
        return torch.ops.cudnn_autotune.conv_dgrad(a, b, problem.input_shape, *geometry)
    return torch.ops.cudnn_autotune.conv_wgrad(a, b, problem.weight_shape, *geometry)


def result_bytes(problem: ca.ConvProblem) -> int:
    return 4 * (1024 * 1024 * 9 if problem.op == "wgrad" else 1024 * 64)


@pytest.mark.parametrize("mode", ["heuristic", "sample_once", "auto"])
def test_tuning_where_workspaces_cannot_be_had(
    mode: str,
    problem: ca.ConvProblem,
    crowd: Callable[[int | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = random_operands(problem, "cuda")
    right = reference(problem, a, b)
    crowd(result_bytes(problem) + HEADROOM)
    with caplog.at_level(logging.INFO):
        output = run(problem, a, b, mode)
    assert_close(output, right, TF32_TOLERANCE, problem.op)
    # An error that is kept, by whoever keeps log records, keeps the tensors of its frames.
    values = [argument for record in caplog.records for argument in record.args or ()]
    assert not any(isinstance(argument, BaseException) for argument in values)
    assert not any(record.exc_info for record in caplog.records)


def test_copies_that_keep_the_cache_cold_leave_room(crowd: Callable[[int | None], None]) -> None:
    problem = ca.ConvProblem(op="fprop", input_shape=(1, 64, 64, 64), weight_shape=(64, 64, 1, 1))
    data = operands(problem)
    crowd(HEADROOM)
    sets = cold_sets(problem, data)
    assert len(sets) > 1
    room = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(6)]
    assert len(room) == 6  # got without an error, all at once
    x, w, y = data
    for other in sets[1:]:
        assert torch.equal(other[0], x)
        assert torch.equal(other[1], w)
        assert other[2] is y


def test_running_where_the_chosen_workspace_cannot_be_had(
    problem: ca.ConvProblem, crowd: Callable[[int | None], None]
) -> None:
    """Tuned with all the memory there is; by the second call it is gone, by the third back."""
    a, b = random_operands(problem, "cuda")
    right = reference(problem, a, b)
    output = run(problem, a, b, HUNGRIEST.name)
    assert_close(output, right, TF32_TOLERANCE, problem.op)
    (choice,) = ca.choices()
    assert choice.workspace_bytes > HEADROOM
    del output
    crowd(result_bytes(problem) + HEADROOM)
    output = run(problem, a, b, HUNGRIEST.name)
    assert_close(output, right, TF32_TOLERANCE, problem.op)
    assert any("no memory to run" in reason for reason in ca.fallbacks())
    del output
    crowd(None)
    output = run(problem, a, b, HUNGRIEST.name)
    assert_close(output, right, TF32_TOLERANCE, problem.op)


def test_a_result_that_cannot_be_had_is_out_of_memory(crowd: Callable[[int | None], None]) -> None:
    """As PyTorch: the caller's error, not a fallback."""
    input = torch.randn(1, 8, 64, 64, device="cuda")
    weight = torch.randn(8192, 8, 1, 1, device="cuda")  # an output of 128 MiB
    crowd(HEADROOM)
    for convolution in (torch.nn.functional.conv2d, ca.functional.conv2d):
        with pytest.raises(torch.OutOfMemoryError):
            convolution(input, weight)


def test_where_pytorchs_path_is_chosen_nothing_else_is_allocated() -> None:
    """No output that nobody writes, and no copy in another layout."""
    input = torch.randn(64, 64, 56, 56, device="cuda", dtype=torch.float16)
    weight = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.float16)
    weight = weight.contiguous(memory_format=torch.channels_last)

    def peak(call: Callable[[], Tensor]) -> int:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    theirs = peak(lambda: torch.nn.functional.conv2d(input, weight, padding=1))
    ours = peak(lambda: ca.functional.conv2d(input, weight, padding=1, sampling=ONLY_ATEN.name))
    assert {choice.text for choice in ca.choices()} == {"aten"}
    assert ours == theirs
