"""Modes of the users' own, and what the search does around any mode."""

from __future__ import annotations

import pytest
import torch
from support.conv.references import assert_close
from support.conv.small_layer import expected
from support.processes.threads import in_threads
from support.tuning.strategies import COUNTING, HUNGRIEST
from torch import Tensor

import cudnn_autotune as ca


def test_a_strategy_decides(operands: tuple[Tensor, Tensor]) -> None:
    output = ca.functional.conv2d(*operands, sampling=HUNGRIEST.name)
    assert_close(output, expected(*operands), 2e-3)
    (choice,) = ca.choices()
    offered = ca.expert.candidates(choice.problem, device="cuda")
    assert choice.sampling == HUNGRIEST.name
    assert choice.workspace_bytes == max(c.workspace_bytes for c in offered) > 0


def test_threads_that_miss_on_one_problem_tune_once(operands: tuple[Tensor, Tensor]) -> None:
    outputs: list[Tensor] = []

    def work(_: int) -> None:
        outputs.append(ca.functional.conv2d(*operands, sampling=COUNTING.name))

    before = COUNTING.calls
    torch.cuda.synchronize()
    in_threads(6, work)
    torch.cuda.synchronize()
    assert len(outputs) == 6
    assert COUNTING.calls == before + 1
    assert len(ca.choices()) == 1
    for output in outputs:
        assert_close(output, expected(*operands), 2e-3)


def test_an_error_in_a_strategy_reaches_the_caller(operands: tuple[Tensor, Tensor]) -> None:
    """And leaves no lock held and no choice made."""
    COUNTING.error = KeyError("of the strategy's own")
    with pytest.raises(KeyError, match="of the strategy's own"):
        ca.functional.conv2d(*operands, sampling=COUNTING.name)
    assert ca.choices() == []
    COUNTING.error = None
    output = ca.functional.conv2d(*operands, sampling=COUNTING.name)
    assert_close(output, expected(*operands), 2e-3)
    assert len(ca.choices()) == 1
