"""A choice that was made while memory was short: it serves until there is memory, and is not
kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.conv.problems import HEADROOM, HUNGRY
from support.conv.references import TF32_TOLERANCE, assert_close, random_operands, reference
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.online.tuner import TUNER
from cudnn_autotune.timers.lacking import available_bytes
from cudnn_autotune.tuning import checking
from cudnn_autotune.tuning.checking import OutputCheck

pytestmark = pytest.mark.usefixtures("store")

PROBLEM = ca.ConvProblem("fprop", **HUNGRY)
FIRST_CALLS = 16


@pytest.fixture
def heard() -> Iterator[list[ca.Choice]]:
    """The choices that are announced."""
    found: list[ca.Choice] = []
    with ca.on_decision(found.append):
        yield found


class Layer:
    """The calls of the problem, whose results are compared."""

    def __init__(self) -> None:
        self.x, self.w = random_operands(PROBLEM, "cuda")
        self.right = reference(PROBLEM, self.x, self.w)
        torch.cuda.synchronize()

    def __call__(self, times: int = 1) -> None:
        for _ in range(times):
            y = self.run()
        assert_close(y, self.right, TF32_TOLERANCE)

    def run(self) -> Tensor:
        return ca.functional.conv2d(self.x, self.w, padding=1, sampling="race")


def only() -> ca.Choice:
    (choice,) = ca.choices()
    return choice


def unused_bytes() -> int:
    """Returns what PyTorch's allocator keeps and no tensor uses."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def is_hungry_timed(choice: ca.Choice) -> bool:
    ranking = choice.selection.ranking
    return any(e.time_ms is not None and e.candidate.workspace_bytes > HEADROOM for e in ranking)


@pytest.fixture
def layer(crowd: Callable[[int | None], None]) -> Layer:
    """A layer that was first called while memory was short."""
    one = Layer()
    crowd(one.right.nbytes + HEADROOM)
    one()
    return one


def test_available_memory_is_what_can_be_allocated(crowd: Callable[[int | None], None]) -> None:
    whole = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del whole
    beside_a_hole = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    hole = unused_bytes()
    crowd(64 << 20)
    found = available_bytes(0)
    unused = unused_bytes()
    assert unused < hole - beside_a_hole.nbytes
    assert abs(found - (64 << 20) - unused) < 4096  # the share is a rounded fraction
    held = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    assert available_bytes(0) == found - held.nbytes
    del held
    assert available_bytes(0) == found  # the allocator keeps it, and can give it
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(found + (2 << 20), dtype=torch.uint8, device="cuda")


def test_with_memory_later_calls_are_tuned_again_and_only_that_is_kept(
    layer: Layer, crowd: Callable[[int | None], None], heard: list[ca.Choice], store: ca.Store
) -> None:
    first = only()
    assert "left out because memory was short" in first.provisional
    assert not is_hungry_timed(first)
    assert list(store) == []
    # Calls without memory change nothing, and are not searched for: 16, then 32.
    layer(FIRST_CALLS + 1)
    assert heard == []
    crowd(None)
    layer(2 * FIRST_CALLS)
    assert (heard, only()) == ([], first)
    layer()
    assert heard == [only()]
    assert only().provisional == ""
    assert is_hungry_timed(only())
    assert [decision.chosen.candidate.text for decision in store] == [only().text]  # type: ignore[union-attr]
    layer(100)
    assert len(heard) == 1


def test_another_thread_is_served_by_it_and_takes_over_what_is_final(
    layer: Layer, crowd: Callable[[int | None], None], heard: list[ca.Choice]
) -> None:
    steps = [threading.Event() for _ in range(2)]
    errors: list[BaseException] = []

    def other() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                layer()
                steps[0].set()
                assert steps[1].wait(60)
                layer(FIRST_CALLS + 1)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)
        finally:
            steps[0].set()

    thread = threading.Thread(target=other)
    thread.start()
    assert steps[0].wait(60)
    assert heard == []
    crowd(None)
    layer(FIRST_CALLS + 1)
    assert heard == [only()]
    steps[1].set()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []
    assert heard == [only()]


def test_a_capture_takes_it_and_a_later_call_tunes(
    layer: Layer, crowd: Callable[[int | None], None], heard: list[ca.Choice]
) -> None:
    layer(FIRST_CALLS)
    crowd(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run()
        captured = layer.run()
    graph.replay()
    assert_close(captured, layer.right, TF32_TOLERANCE)
    assert heard == []
    layer()
    assert heard == [only()]
    assert only().provisional == ""
    graph.replay()
    assert_close(captured, layer.right, TF32_TOLERANCE)


def test_a_search_that_runs_out_of_memory_is_made_again(
    crowd: Callable[[int | None], None], heard: list[ca.Choice], store: ca.Store
) -> None:
    """For whatever reason: PyTorch's own path serves meanwhile."""
    from cudnn_autotune.timers.gpu_timer import GpuTimer

    one = Layer()
    crowd(one.right.nbytes + HEADROOM)
    with pytest.MonkeyPatch.context() as patch:

        def full(*_: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(GpuTimer, "run", full)
        one()
    assert only().text == "aten"
    assert "memory" in only().provisional
    one(FIRST_CALLS + 1)
    assert len(heard) == 1  # there is no more memory than before
    crowd(None)
    one(2 * FIRST_CALLS + 1)
    assert heard[1:] == [only()]
    assert only().provisional == ""
    assert len(list(store)) == 1


def test_a_trial_whose_calls_lacked_memory_is_made_again(
    crowd: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch, store: ca.Store
) -> None:
    asked: list[str] = []
    real = checking.begin

    def refuse(problem: ca.ConvProblem, text: str, *rest: Any) -> OutputCheck:
        asked.append(text)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(problem, text, *rest)

    def call_until(is_over: Callable[[], bool], most: int) -> None:
        for _ in range(most):
            if is_over():
                return
            ca.functional.conv2d(x, w, padding=1, sampling="online")
            torch.cuda.synchronize()
        raise AssertionError(f"not over after {most} calls")

    monkeypatch.setattr(checking, "begin", refuse)
    x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.float16)
    w = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.float16)
    crowd(256 << 20)
    call_until(lambda: TUNER.undecided > 0, 3)
    call_until(lambda: TUNER.undecided == 0, 20_000)
    assert only().provisional == "1 candidate was left out because memory was short"
    assert list(store) == []
    crowd(None)
    call_until(lambda: TUNER.undecided > 0, FIRST_CALLS + 4)
    call_until(lambda: TUNER.undecided == 0, 20_000)
    assert only().provisional == ""
    (decision,) = store
    assert asked[1] in [entry.candidate.text for entry in only().selection.ranking]
    assert decision.selection.winner.candidate == only().selection.winner.candidate
