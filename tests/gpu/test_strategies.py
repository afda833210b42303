"""Modes of the users' own, and what the search does around any mode."""

from __future__ import annotations

import threading

import checkout
import pytest
import torch
from references import assert_close
from strategies import COUNTING, HUNGRIEST, NOTHING
from subprocesses import evaluate
from torch import Tensor

import cudnn_autotune as ca

pytestmark = pytest.mark.gpu


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    input = torch.randn(4, 16, 20, 20, device="cuda", dtype=torch.float16)
    weight = torch.randn(24, 16, 3, 3, device="cuda", dtype=torch.float16)
    return input, weight


@pytest.fixture
def expected(operands: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.conv2d(*(t.cpu().double() for t in operands))


def test_a_strategy_decides(operands: tuple[Tensor, Tensor], expected: Tensor) -> None:
    output = ca.functional.conv2d(*operands, sampling=HUNGRIEST.name)
    assert_close(output, expected, 2e-3)
    (choice,) = ca.choices()
    offered = ca.expert.candidates(choice.problem, device="cuda")
    assert choice.sampling == HUNGRIEST.name
    assert choice.workspace_bytes == max(c.workspace_bytes for c in offered) > 0


def test_aten_serves_where_no_engine_runs(
    operands: tuple[Tensor, Tensor], expected: Tensor
) -> None:
    for _ in range(2):
        assert_close(ca.functional.conv2d(*operands, sampling=NOTHING.name), expected, 2e-3)
    (choice,) = ca.choices()
    assert (choice.text, choice.engine, choice.time_ms) == ("aten", None, None)
    assert sum(ca.fallbacks().values()) == 2


def test_a_mode_of_the_environment_is_asked_for_at_the_first_search() -> None:
    """Refused there until somebody has registered it."""
    code = """
import torch, cudnn_autotune as ca
x, w = torch.randn(2, 16, 20, 20, device="cuda"), torch.randn(24, 16, 3, 3, device="cuda")
try:
    ca.functional.conv2d(x, w)
except ValueError as error:
    print(error)
import strategies
ca.functional.conv2d(x, w)
print(ca.choices()[0].sampling)
"""
    tests = str(checkout.TESTS)
    code = f"import sys; sys.path.insert(0, {tests!r})\n{code}"
    refused, served = evaluate(code, {"CUDNN_AUTOTUNE_SAMPLING": COUNTING.name}).splitlines()
    assert refused.startswith("CUDNN_AUTOTUNE_SAMPLING must be one of 'heuristic', ")
    assert refused.endswith(f", got {COUNTING.name!r}")
    assert served == COUNTING.name


def test_threads_that_miss_on_one_problem_tune_once(
    operands: tuple[Tensor, Tensor], expected: Tensor
) -> None:
    count = 6
    barrier = threading.Barrier(count)
    outputs: list[Tensor] = []

    def work() -> None:
        barrier.wait(timeout=60)
        outputs.append(ca.functional.conv2d(*operands, sampling=COUNTING.name))

    before = COUNTING.calls
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    torch.cuda.synchronize()
    assert len(outputs) == count, "a thread failed or hangs"
    assert COUNTING.calls == before + 1
    assert len(ca.choices()) == 1
    for output in outputs:
        assert_close(output, expected, 2e-3)


def test_an_error_in_a_strategy_reaches_the_caller(
    operands: tuple[Tensor, Tensor], expected: Tensor
) -> None:
    """And leaves no lock held and no choice made."""
    COUNTING.error = KeyError("of the strategy's own")
    with pytest.raises(KeyError, match="of the strategy's own"):
        ca.functional.conv2d(*operands, sampling=COUNTING.name)
    assert ca.choices() == []
    COUNTING.error = None
    assert_close(ca.functional.conv2d(*operands, sampling=COUNTING.name), expected, 2e-3)
    assert len(ca.choices()) == 1
