"""Built plans: a bounded number for each thread; what was dropped is rebuilt, not tuned again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from references import assert_close
from strategies import COUNTING
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C

pytestmark = pytest.mark.gpu

BATCHES = (1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def room_for_two() -> Iterator[None]:
    before = _C.plan_cache_capacity()
    _C.set_plan_cache_capacity(2)
    yield
    _C.set_plan_cache_capacity(before)


def operands(batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    input = torch.randn(batch, 8, 12, 12, generator=generator)
    weight = torch.randn(16, 8, 3, 3, generator=generator)
    return input.to("cuda", torch.float16), weight.to("cuda", torch.float16)


def run_all() -> None:
    for batch in BATCHES:
        input, weight = operands(batch)
        output = ca.functional.conv2d(input, weight, sampling=COUNTING.name)
        expected = torch.nn.functional.conv2d(input.cpu().double(), weight.cpu().double())
        assert_close(output, expected, 2e-3)


def test_dropped_plans_are_rebuilt_and_not_tuned_again() -> None:
    before = COUNTING.calls
    run_all()
    assert COUNTING.calls == before + len(BATCHES)
    choices = ca.choices()
    run_all()
    run_all()
    assert COUNTING.calls == before + len(BATCHES)
    assert ca.choices() == choices
    assert ca.fallbacks() == {}


def test_another_thread_builds_its_own_plans_of_the_same_choices() -> None:
    before = COUNTING.calls
    run_all()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(run_all).result(timeout=120)
    assert COUNTING.calls == before + len(BATCHES)


def test_a_pin_reaches_every_thread_and_no_other_problem() -> None:
    pinned, other = BATCHES[:2]
    problem = ca.ConvProblem("fprop", (pinned, 8, 12, 12), (16, 8, 3, 3), dtype=torch.float16)
    before = COUNTING.calls
    threads = 2
    meeting = threading.Barrier(threads + 1, timeout=120)
    errors: list[BaseException] = []

    def run(batch: int) -> None:
        input, weight = operands(batch)
        output = ca.functional.conv2d(input, weight, sampling=COUNTING.name)
        expected = torch.nn.functional.conv2d(input.cpu().double(), weight.cpu().double())
        assert_close(output, expected, 2e-3)

    def work() -> None:
        try:
            for _ in range(2):
                run(pinned)
                run(other)
                meeting.wait()  # all plans are cached
                meeting.wait()  # pinned
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        meeting.wait()
        assert ca.fallbacks() == {}
        assert COUNTING.calls == before + 2
        ca.pin(problem, "aten")
        meeting.wait()
        meeting.wait()
        assert ca.fallbacks() == {"PyTorch's own path was chosen (see choices())": threads}
        assert COUNTING.calls == before + 2, "the other problem's choice stands"
        meeting.wait()
    finally:
        for worker in workers:
            worker.join(timeout=120)
    assert not errors, errors
