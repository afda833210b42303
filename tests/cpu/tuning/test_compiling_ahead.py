"""Engines are compiled before the searches of their problems ask for them.

No engine is compiled at run time for a GPU that is not here. So these tests compile all engines
that cuDNN has for a GPU that is described.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.problems import make
from support.processes.subprocesses import evaluate_forked

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.core.background import BackgroundThreads
from cudnn_autotune.engines.configs import Candidate, open_search
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.unlisted import without_cudnn
from cudnn_autotune.tuning import compiling_ahead
from cudnn_autotune.tuning.compiling_ahead import (
    compiling,
    is_ready,
    start,
    start_backward,
    take,
)

pytestmark = pytest.mark.search

PROBLEM = make("resnet_fp16_nhwc")
DGRAD, WGRAD = (make("resnet_fp16_nhwc", op=op) for op in ("dgrad", "wgrad"))


@pytest.fixture(autouse=True)
def all_are_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Candidate, "is_compiled", property(lambda one: one.engine is not None))
    yield
    for key in list(compiling_ahead._begun):
        compiling_ahead._drop([key])
    compiling_ahead._kernels.clear()


def finish() -> None:
    """Waits until all that has begun is compiled."""
    for listing in list(compiling_ahead._begun.values()):
        wait(listing.result(60).values(), 60)


def built(problem: ca.ConvProblem) -> dict[str, _C.Plan]:
    """The plans that a search of the problem takes."""
    found = {text: plan.result(60) for text, plan in take(problem, "h200").items()}
    assert all(len(plans) == 1 for plans in found.values())
    return {text: plans[0][0] for text, plans in found.items() if plans[0][0] is not None}


@pytest.fixture
def busy_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The only thread that compiles waits for this event."""
    threads, event, is_waiting = BackgroundThreads(1), threading.Event(), threading.Event()
    for name in ("COMPILING", "COMPILING_CUDNN"):
        monkeypatch.setattr(compiling_ahead, name, threads)

    def work() -> None:
        is_waiting.set()
        event.wait(60)

    future = threads.submit(work)
    is_waiting.wait(60)
    yield event
    event.set()
    future.result(60)


def test_searches_take_the_plans() -> None:
    problems = [PROBLEM, DGRAD]
    with compiling([(p, "h200", "race", None) for p in problems * 2]):
        finish()
        for problem in problems:
            plans = built(problem)
            assert len(plans) > 10
            assert all(plan.text == text for text, plan in plans.items())
            assert take(problem, "h200") == {}


def test_auto_compiles_what_pytorch_times_and_one_kernel_of_an_engine() -> None:
    """As its search does. PyTorch times ten."""
    with compiling([(PROBLEM, "h200", "auto", None)]):
        finish()
        found = built(PROBLEM)
    every = ca.expert.candidates(PROBLEM, device="h200")
    engines = {candidate.engine for candidate in every}
    assert 10 <= len(found) <= 10 + len(engines) < len(every)


def test_a_problem_that_cudnn_does_not_take_is_for_its_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise _C.CudnnError("no graph")

    monkeypatch.setattr(compiling_ahead, "open_search", refuse)
    start(PROBLEM, "h200", "race", None)
    finish()
    assert built(PROBLEM) == {}


def test_what_no_search_has_taken_is_dropped() -> None:
    with compiling([(p, "h200", "auto", None) for p in (PROBLEM, DGRAD)]):
        take(PROBLEM, "h200")
    assert not compiling_ahead._begun


def test_what_was_begun_last_is_compiled_first(
    busy_threads: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def listed(
        _: Any, of_cudnn: Any, place: Any, problem: ca.ConvProblem, *more: Any
    ) -> dict[str, Future[Any]]:
        order.append(problem.op)
        return {}

    monkeypatch.setattr(compiling_ahead, "_compile", listed)
    for problem in (WGRAD, DGRAD, PROBLEM):
        start(problem, "h200", "auto", None)
    busy_threads.set()
    finish()
    assert order == ["fprop", "dgrad", "wgrad"]


def test_a_graphs_problems_are_compiled_in_their_order(
    busy_threads: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with all of its engines, and before those that were begun earlier."""
    done: list[str] = []

    class Recorded:
        def __init__(self, problem: ca.ConvProblem, device: str) -> None:
            self._op, self._search = problem.op, open_search(problem, device)
            done.append(f"list {self._op}")

        def build_many(self, texts: list[str], threads: int) -> Any:
            done.append(f"build {self._op}")
            return self._search.build_many(texts, threads)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._search, name)

    monkeypatch.setattr(compiling_ahead, "open_search", Recorded)
    start(WGRAD, "h200", "auto", None)
    with compiling([(p, "h200", "auto", None) for p in (PROBLEM, DGRAD)]):
        busy_threads.set()
        finish()
    steps = [step for step, _ in itertools.groupby(done)]
    assert steps == [
        f"{what} {op}" for op in ("fprop", "dgrad", "wgrad") for what in ("list", "build")
    ]


def test_a_problem_is_ready_once_its_engines_are_compiled(busy_threads: threading.Event) -> None:
    assert is_ready(PROBLEM, "h200")
    with compiling([(PROBLEM, "h200", "auto", None)]):
        assert not is_ready(PROBLEM, "h200")
        assert is_ready(DGRAD, "h200")
        busy_threads.set()
        finish()
        assert is_ready(PROBLEM, "h200")
        assert built(PROBLEM)
        assert is_ready(PROBLEM, "h200")


def test_kernels_that_problems_share_are_compiled_for_the_first_of_them() -> None:
    gpu = gpu_of("h200")
    long, longer = (
        ca.ConvProblem(
            "fprop",
            (8, 64, 1, length),
            (64, 64, 1, 7),
            padding=(0, 3),
            dtype=torch.float16,
            memory_format=torch.channels_last,
        )
        for length in (16384, 16640)
    )
    texts = [
        c.text for c in without_cudnn(long, gpu, None) if c.text.startswith("implicit_gemm_1d@")
    ]
    shared = set(texts) & {c.text for c in without_cudnn(longer, gpu, None)}
    assert len(shared) > 1
    for text in shared:
        assert compiling_ahead._is_first(text, long, gpu)
        assert not compiling_ahead._is_first(text, longer, gpu)


def test_problems_beyond_a_number_are_dropped(
    busy_threads: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling_ahead, "_MOST", 2)
    for problem in (PROBLEM, DGRAD, WGRAD):
        start(problem, "h200", "auto", None)
    busy_threads.set()
    finish()
    assert built(PROBLEM) == {}
    assert built(DGRAD)
    assert built(WGRAD)


@pytest.mark.parametrize("expected", [(True, True), (False, True), (True, False), (False, False)])
def test_the_backward_of_a_forward_is_compiled(
    expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "expected_gradients", lambda: expected)
    start_backward(replace(PROBLEM, bias=True), "h200", "auto", None)
    finish()
    of_input, of_weight = expected
    assert bool(built(DGRAD)) is of_input
    assert bool(built(WGRAD)) is of_weight
    assert built(PROBLEM) == {}


def test_a_gradient_lies_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "expected_gradients", lambda: (True, True))
    start_backward(replace(PROBLEM, alignment=(2, 16, 32)), "h200", "auto", None)
    finish()
    assert built(replace(DGRAD, alignment=(32, 16, 32)))
    assert built(replace(WGRAD, alignment=(2, 32, 32)))


def test_a_forked_process_has_none_of_it() -> None:
    code = """
import os

import cudnn_autotune as ca
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.unlisted import without_cudnn
from cudnn_autotune.tuning import compiling_ahead

problem = ca.ConvProblem("fprop", (8, 64, 56, 56), (64, 64, 3, 3), padding=1)
compiling_ahead.start(problem, "h200", "race", None)
assert compiling_ahead._begun
child = os.fork()
if not child:
    os._exit(0 if compiling_ahead.take(problem, "h200") == {} else 1)
print(os.waitpid(child, 0)[1])
"""
    assert evaluate_forked(code) == "0"
