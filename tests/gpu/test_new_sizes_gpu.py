"""On a GPU: a layer whose sizes keep changing is served by a neighbour's engine, then measured."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.online.tuner import TUNER
from cudnn_autotune.tuning import new_sizes

ALLOWED = 2e-2
FIRST = 16  # the width that is tuned
MOST_CALLS = 300_000
MOST_S = 120.0

Operands = tuple[Tensor, Tensor]


def operands(width: int, height: int = 20) -> Operands:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(4, 32, height, width, generator=generator).to("cuda", torch.float16)
    w = torch.randn(48, 32, 3, 3, generator=generator).to("cuda", torch.float16)
    return x.contiguous(memory_format=torch.channels_last), w.contiguous(
        memory_format=torch.channels_last
    )


def problem(width: int) -> ca.ConvProblem:
    return ca.ConvProblem(
        "fprop",
        (4, 32, 20, width),
        (48, 32, 3, 3),
        padding=1,
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )


def call(x: Tensor, w: Tensor, mode: str = "auto") -> Tensor:
    return ca.functional.conv2d(x, w, padding=1, sampling=mode)


def right(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.double(), w.double(), padding=1)


def of_width(width: int, op: str = "fprop") -> ca.Choice:
    (found,) = [c for c in ca.choices() if c.problem.input_shape[3] == width and c.problem.op == op]
    return found


def origins(op: str = "fprop") -> Counter[str]:
    return Counter(c.origin for c in ca.choices() if c.problem.op == op)


@pytest.fixture(autouse=True)
def store(tmp_path: Path) -> Iterator[ca.Store]:
    ca.set_store(tmp_path, mode="read_write")
    yield ca.get_store()
    ca.forget()
    deadline = time.monotonic() + 30
    while TUNER.undecided and time.monotonic() < deadline:
        time.sleep(0.02)
    assert TUNER.undecided == 0, "a trial outlives forget()"


@pytest.fixture(autouse=True)
def soon_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of new sizes begin with the least call that they may."""
    monkeypatch.setattr(new_sizes, "_PAID_BACK_MS", 0.0)


@pytest.fixture
def changing() -> None:
    """A layer of which one size has been tuned."""
    call(*operands(FIRST))
    assert origins() == {"tuned": 1}


@pytest.mark.parametrize("policy", ["online", "neighbour"])
def test_a_new_size_is_served_unmeasured_and_right(
    changing: None, policy: str, store: ca.Store
) -> None:
    ca.set_new_shapes(policy)
    for width in (17, 21, 23):
        x, w = operands(width)
        assert_close(call(x, w), right(x, w), ALLOWED)
        made = of_width(width)
        assert (made.origin, made.total_samples) == ("neighbour", 0)
        assert made.text == "aten" or made.relative_error <= ALLOWED
        winner = made.selection.winner.candidate
        assert winner.id.is_implementation or not winner.is_compiled
    assert len(store) == 1
    assert TUNER.undecided == 0, "a size that does not recur is not tried"


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize(
    ("channels", "filters", "edge", "groups"),
    [(64, 64, 3, 1), (3, 64, 7, 1), (128, 128, 3, 32), (96, 96, 7, 96), (256, 64, 1, 1)],
)
def test_sizes_far_from_the_measured_ones_are_served_by_pytorch(
    layout: torch.memory_format, channels: int, filters: int, edge: int, groups: int
) -> None:
    w = torch.randn(filters, channels // groups, edge, edge, device="cuda", dtype=torch.half)
    w = w.contiguous(memory_format=layout)

    def check(*size: int) -> ca.Choice:
        x = torch.randn(size[0], channels, *size[1:], device="cuda", dtype=torch.half)
        x = x.contiguous(memory_format=layout)
        for _ in range(20):  # PyTorch's own path serves further calls as well
            y = ca.functional.conv2d(x, w, padding=edge // 2, groups=groups)
        expected = F.conv2d(x.double(), w.double(), padding=edge // 2, groups=groups)
        assert_close(y, expected, ALLOWED)
        assert y.is_contiguous(memory_format=layout)
        return ca.choices()[-1]

    for height in range(64, 137, 8):
        check(8, height, height + 8)
    for size in ((1, 8, 8), (64, 14, 14), (1, 1, 2000), (128, 7, 9)):
        made = check(*size)
        assert (made.origin, made.text, made.total_samples) == ("neighbour", "aten", 0)


def until_decided(once: Callable[[], object]) -> None:
    deadline = time.monotonic() + MOST_S
    for calls in range(MOST_CALLS):
        once()
        if calls > 20 and TUNER.undecided == 0:
            return
        if calls % 16 == 15:
            torch.cuda.synchronize()
        assert time.monotonic() < deadline, f"not decided after {calls} calls"
    raise AssertionError(f"not decided after {MOST_CALLS} calls")


def test_a_size_that_recurs_is_measured_in_turns_and_stored(
    changing: None, store: ca.Store
) -> None:
    x, w = operands(17)
    expected = right(x, w)
    wrong = torch.zeros((), device="cuda")

    def once() -> None:
        y = call(x, w).double()
        wrong.add_(((y - expected).norm() / expected.norm() > ALLOWED).float())

    for _ in range(8):
        once()
    assert TUNER.undecided == 0
    until_decided(once)
    assert wrong.item() == 0
    made = of_width(17)
    if made.origin == "neighbour":
        pytest.skip("its neighbours' winner is the heuristics' first: no contender")
    assert (made.origin, made.sampling) == ("tuned", "auto")
    assert made.total_samples > 0
    assert any("a new size" in remark for remark in made.selection.evidence.remarks)
    assert len(store) == 2
    ca.forget()
    assert_close(call(x, w), expected, ALLOWED)
    assert of_width(17).origin == "store"


def test_a_size_that_pytorch_serves_is_measured_once_it_recurs(
    changing: None, store: ca.Store
) -> None:
    for width in range(17, 26):
        call(*operands(width))
    x, w = operands(300, 100)
    expected = right(x, w)
    call(x, w)
    made = of_width(300)
    assert (made.origin, made.text) == ("neighbour", "aten")
    until_decided(lambda: assert_close(call(x, w), expected, ALLOWED))
    made = of_width(300)
    if made.origin == "neighbour":
        pytest.skip("there is no contender")
    assert made.total_samples > 0
    assert_close(call(x, w), expected, ALLOWED)


def test_calls_of_other_sizes_do_not_disturb_a_capture(changing: None) -> None:
    x, w = operands(17)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = call(x, w)
    graph.replay()
    assert_close(y, right(x, w), ALLOWED)
    assert_close(call(x, w), right(x, w), ALLOWED)
    assert of_width(17).origin == "neighbour"
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        y = call(x, w)
    y.zero_()
    graph.replay()
    assert_close(y, right(x, w), ALLOWED)


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_many_sizes_are_right_and_few_are_tuned(mode: str) -> None:
    rng = random.Random(0)
    before = _C.plan_cache_capacity()
    _C.set_plan_cache_capacity(8)  # plans and trials are dropped, and made again
    try:
        sizes = [(rng.randint(12, 40), rng.randint(12, 40)) for _ in range(60)]
        for width, height in [*sizes, *rng.sample(sizes, 30)]:
            x, w = operands(width, height)
            assert_close(call(x, w, mode), right(x, w), ALLOWED)
    finally:
        _C.set_plan_cache_capacity(before)
    if mode == "auto":
        assert 2 <= origins()["tuned"] <= 16
        assert origins()["neighbour"] >= 30
    assert ca.fallbacks().keys() <= {"PyTorch's own path was chosen (see choices())"}
