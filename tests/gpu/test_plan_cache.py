"""Built plans: a bounded number for each thread; what was dropped is rebuilt, not tuned again.

Those that a CUDA graph captured live as long as the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.conv.references import assert_close
from support.processes.subprocesses import python
from support.tuning.settling import comes_to, settled
from support.tuning.strategies import COUNTING
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C

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


class Captured:
    """A graph of a convolution, whose plan is in this thread's cache when the capture begins."""

    def __init__(self, batch: int, calls: int = 1, mode: str = "global", **options: Any) -> None:
        self.input, self.weight = operands(batch)
        self._call()
        torch.cuda.current_stream().synchronize()
        self.graph = torch.cuda.CUDAGraph(**options)
        with torch.cuda.graph(self.graph, capture_error_mode=mode):
            for _ in range(calls):
                self.output = self._call()

    def _call(self) -> Tensor:
        return ca.functional.conv2d(self.input, self.weight, sampling="heuristic")

    def check_replay(self) -> None:
        self.input.mul_(-0.5)
        self.output.fill_(float("nan"))
        self.graph.replay()
        expected = torch.nn.functional.conv2d(self.input.double(), self.weight.double())
        assert_close(self.output, expected, 2e-3)


@pytest.mark.parametrize("keep_graph", [False, True])
def test_a_captured_plan_lives_as_long_as_the_graph(keep_graph: bool) -> None:
    before = settled(_C.kept_for_graphs)
    graphs = [Captured(batch, keep_graph=keep_graph) for batch in BATCHES]
    assert _C.kept_for_graphs() >= before + len(BATCHES)
    ca.forget()
    run_all()  # the cache has other plans now
    for one in graphs:
        one.check_replay()
    last = graphs.pop()
    with_others = _C.kept_for_graphs()
    del one, graphs
    run_all()
    last.check_replay()
    left = settled(_C.kept_for_graphs)
    assert before < left <= with_others - len(BATCHES) + 1
    last.graph.reset()
    assert comes_to(_C.kept_for_graphs, before)


def test_a_plan_that_a_graph_captures_many_times_is_kept_once() -> None:
    before = settled(_C.kept_for_graphs)
    one = Captured(1, calls=20)
    plan_and_its_workspace = 2
    assert before < _C.kept_for_graphs() <= before + plan_and_its_workspace
    one.check_replay()
    by_one = _C.kept_for_graphs() - before
    other = Captured(1)  # of the same plan
    by_other = _C.kept_for_graphs() - before - by_one
    del one
    assert by_other > 0
    assert comes_to(_C.kept_for_graphs, before + by_other)
    other.check_replay()
    del other
    assert comes_to(_C.kept_for_graphs, before)


def test_a_capture_that_comes_to_nothing_keeps_no_plan() -> None:
    before = settled(_C.kept_for_graphs)
    input, weight = operands(1)
    ca.functional.conv2d(input, weight, sampling="heuristic")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def break_off() -> None:
        with torch.cuda.graph(graph):
            ca.functional.conv2d(input, weight, sampling="heuristic")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    graph.reset()
    assert comes_to(_C.kept_for_graphs, before)


BROKEN = """
import torch
import cudnn_autotune as ca
from support.tuning.settling import comes_to

x = torch.randn(2, 8, 12, 12, device="cuda")
w = torch.randn(16, 8, 3, 3, device="cuda")
right = ca.functional.conv2d(x, w, sampling="heuristic")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        ca.functional.conv2d(x, w, sampling="heuristic")
        torch.cuda.synchronize()
except RuntimeError:
    print("broken")
del graph
print(comes_to(ca._C.kept_for_graphs, 0))
"""


def test_a_broken_capture_keeps_no_plan() -> None:
    done = python("-c", BROKEN, cwd=Path(__file__).parents[1])
    assert done.stdout.split() == ["broken", "True"], done.stderr


def test_a_graph_keeps_the_plan_of_a_single_run() -> None:
    """:func:`ca.expert.execute` drops the plan when it returns."""
    before = settled(_C.kept_for_graphs)
    problem = ca.ConvProblem("fprop", (1, 8, 12, 12), (16, 8, 3, 3), dtype=torch.float16)
    input, weight = operands(1)
    texts = [candidate.text for candidate in ca.expert.candidates(problem)][:3]
    for text in texts:
        ca.expert.execute(problem, text, input, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [ca.expert.execute(problem, text, input, weight) for text in texts]
    assert _C.kept_for_graphs() >= before + len(texts)
    run_all()
    input.mul_(2)
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    expected = torch.nn.functional.conv2d(input.double(), weight.double())
    for output, text in zip(outputs, texts, strict=True):
        assert_close(output, expected, 2e-3, text)
    del graph
    assert comes_to(_C.kept_for_graphs, before)


def test_threads_capture_and_destroy_graphs() -> None:
    """One at a time captures, while the others replay, call and destroy."""
    before = settled(_C.kept_for_graphs)
    capturing = threading.Lock()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(8):
                batch = 1 + (index + turn) % len(BATCHES)
                with capturing:
                    one = Captured(batch, mode="thread_local")
                one.check_replay()
                one.check_replay()
                torch.cuda.current_stream().synchronize()
                del one

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, index) for index in range(4)]:
            done.result(timeout=240)
    assert comes_to(_C.kept_for_graphs, before)
