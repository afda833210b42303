"""Small workspaces on pages of their own: where they lie, and that calls do not mix in them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.conv.references import assert_close, random_operands, reference, tolerance
from support.processes.subprocesses import python
from support.tuning.settling import comes_to, settled
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import open_search
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.timer import Batch

PAGE = _C.PlanTimer.PLACE_BYTES if hasattr(_C, "PlanTimer") else 4096
# Many tiles, so that blocks that run beside another's counter would miss some.
PROBLEM: dict[str, Any] = {
    "input_shape": (16, 64, 56, 56), "weight_shape": (64, 64, 3, 3), "padding": 1,
    "dtype": torch.float16, "memory_format": torch.channels_last,
}  # fmt: skip


@pytest.fixture(scope="module")
def problem() -> ca.ConvProblem:
    return ca.ConvProblem("fprop", **PROBLEM)


@pytest.fixture(scope="module")
def engine_text(problem: ca.ConvProblem) -> str:
    """Of an engine that needs a small workspace and writes to it."""
    timer = GpuTimer.open(problem)
    try:
        for candidate in timer.runnable(ca.expert.candidates(problem)):
            plan = timer.plans[candidate.text]
            if not 0 < plan.workspace_bytes <= PAGE:
                continue
            block = torch.full((PAGE,), 0xA5, dtype=torch.uint8, device="cuda")
            native = _C.PlanTimer(problem.native(), [timer.operands], 0, False)
            native.set_workspace(block)
            native.run([(native.add(plan), 1, False, False)], 0)
            if bool((block != 0xA5).any()):
                return candidate.text
    finally:
        timer.close()
    pytest.skip("no engine here needs a small workspace")


def unused() -> int:
    return _C.workspace_pages(torch.cuda.current_device())[1]


@pytest.fixture
def pages() -> int:
    """How many there are; not all of them are in use, and no earlier test's are still to come."""
    count, _ = _C.workspace_pages(torch.cuda.current_device())
    if not count:
        assert torch.cuda.get_device_capability() != (9, 0), "it has two partitions"
        pytest.skip("this GPU's L2 cache has one partition")
    assert settled(unused) > 10, "an earlier test has left none"
    return count


@pytest.fixture
def new_stream() -> Iterator[torch.cuda.ExternalStream]:
    """One that has never run anything: torch's own come from a pool."""
    handle = ctypes.c_void_p()
    cudart = torch.cuda.cudart()
    assert cudart.cudaStreamCreate(ctypes.addressof(handle)) == cudart.cudaError.success
    assert handle.value is not None
    yield torch.cuda.ExternalStream(handle.value)
    torch.cuda.synchronize()
    cudart.cudaStreamDestroy(handle.value)


class Calls:
    """One engine's plan on operands of its own; each call's result differs from the last one's."""

    def __init__(self, problem: ca.ConvProblem, engine_text: str) -> None:
        self.problem = problem
        self.a, self.b = random_operands(problem, "cuda")
        self.expected = reference(problem, self.a, self.b)
        ((plan, error),) = open_search(problem, torch.cuda.current_device()).build_many(
            [engine_text], 1
        )
        assert plan is not None, error
        self.plan = plan
        self.x = torch.empty_like(self.a)
        self.y = torch.empty_like(self.expected, dtype=problem.dtype, device="cuda")
        self.y = self.y.contiguous(memory_format=problem.memory_format)

    def launch(self, scale: float) -> None:
        torch.mul(self.a, scale, out=self.x)
        _C.execute(self.plan, self.x, self.b, self.y)

    def check(self, scale: float, what: str) -> None:
        assert_close(self.y / scale, self.expected, tolerance(self.problem.dtype), what)


def warmed_up(problem: ca.ConvProblem, engine_text: str) -> tuple[Calls, torch.cuda.Stream, int]:
    """Calls that have run once on a stream, that stream, and how many pages are unused then."""
    calls = Calls(problem, engine_text)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls.launch(1.0)
    torch.cuda.synchronize()
    return calls, stream, unused()


def captured(calls: Calls, stream: torch.cuda.Stream, launches: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of calls that have run before, captured on ``stream``."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            calls.launch(1.0)
    return graph


SCALES = (1.0, -2.0, 0.5, -1.0, 2.0, -0.5)  # exact in every dtype


def test_a_timed_workspace_is_on_the_pages(
    problem: ca.ConvProblem, engine_text: str, pages: int
) -> None:
    """And not in the block that serves the others."""
    timer = GpuTimer.open(problem)
    try:
        (candidate,) = (c for c in ca.expert.candidates(problem) if c.text == engine_text)
        assert timer.runnable([candidate])
        block = torch.full((20 * PAGE,), 0xA5, dtype=torch.uint8, device="cuda")
        for uses_pages in (False, True):
            native = _C.PlanTimer(problem.native(), [timer.operands], 0, uses_pages)
            native.set_workspace(block)
            number = native.add(timer.plans[engine_text])
            for as_graph in (False, True):
                block.fill_(0xA5)
                torch.cuda.synchronize()
                ((time_ms, *_, error),) = native.run([(number, 40, False, as_graph)], 0)
                assert not error
                assert time_ms > 0
                assert bool((block == 0xA5).all()) is uses_pages
        assert not timer.run([Batch(candidate, 5)])[0].error
    finally:
        timer.close()


def test_a_stream_has_a_page_of_its_own(
    problem: ca.ConvProblem, engine_text: str, pages: int, new_stream: torch.cuda.ExternalStream
) -> None:
    """Every call on it has that one, since one call has ended when the next begins."""
    calls = Calls(problem, engine_text)
    torch.cuda.synchronize()
    before = unused()
    with torch.cuda.stream(new_stream):
        for scale in SCALES:
            calls.launch(scale)
    torch.cuda.synchronize()
    calls.check(SCALES[-1], "the last")
    assert unused() == before - 1


def test_a_graph_has_a_page_of_its_own_until_it_is_destroyed(
    problem: ca.ConvProblem, engine_text: str, pages: int
) -> None:
    calls, stream, before = warmed_up(problem, engine_text)
    graph = captured(calls, stream, launches=3)
    assert unused() == before - 1
    calls.y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    calls.check(1.0, "replayed")
    graph.reset()
    assert comes_to(unused, before)


def test_a_graph_that_is_destroyed_while_it_runs_returns_its_page_afterwards(
    problem: ca.ConvProblem, engine_text: str, pages: int
) -> None:
    calls, stream, before = warmed_up(problem, engine_text)
    other = torch.cuda.Stream()
    graph = captured(calls, stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(1_000_000_000)
        graph.replay()
    graph.reset()  # it may wait for the replay itself
    left = unused()
    if not other.query():
        assert left == before - 1, "another stream could take a page that is still in use"
    torch.cuda.synchronize()
    calls.check(1.0, "replayed")
    assert comes_to(unused, before)


def test_a_capture_that_comes_to_nothing_returns_its_page(
    problem: ca.ConvProblem, engine_text: str, pages: int
) -> None:
    calls, stream, before = warmed_up(problem, engine_text)
    graph = torch.cuda.CUDAGraph()

    def break_off() -> None:
        with torch.cuda.graph(graph, stream=stream):
            calls.launch(1.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert unused() == before - 1
    graph.reset()
    assert comes_to(unused, before)


def test_threads_and_streams_keep_apart(
    problem: ca.ConvProblem, engine_text: str, pages: int
) -> None:
    """Calls that run at once, of several threads on shared streams and on streams of their own."""
    shared = torch.cuda.Stream()
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            own = torch.cuda.Stream()
            with torch.cuda.stream(own):
                calls = Calls(problem, engine_text)
            own.synchronize()
            start.wait(60)
            for turn in range(40):
                stream = shared if turn % 4 == 3 else own
                scale = SCALES[(turn + number) % len(SCALES)]
                with torch.cuda.stream(stream):
                    for _ in range(5):
                        calls.launch(scale)
                    calls.y.fill_(float("nan"))
                    calls.launch(scale)
                stream.synchronize()
                calls.check(scale, f"thread {number}, turn {turn}")
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_graph_beside_eager_calls(problem: ca.ConvProblem, engine_text: str, pages: int) -> None:
    """It is replayed on another stream, while its own serves others, and other graphs run."""
    captures, replays = torch.cuda.Stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    in_graphs = [Calls(problem, engine_text) for _ in replays]
    with torch.cuda.stream(captures):
        for calls in in_graphs:
            calls.launch(1.0)
    torch.cuda.synchronize()
    graphs = [captured(calls, captures) for calls in in_graphs]
    eager = Calls(problem, engine_text)
    torch.cuda.synchronize()
    for turn in range(30):
        scale = SCALES[turn % len(SCALES)]
        outputs: list[Tensor] = [calls.y for calls in (*in_graphs, eager)]
        for output in outputs:
            output.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(4):
            for graph, stream in zip(graphs, replays, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            with torch.cuda.stream(captures):
                eager.launch(scale)
        torch.cuda.synchronize()
        for number, calls in enumerate(in_graphs):
            calls.check(1.0, f"graph {number}, turn {turn}")
        eager.check(scale, f"turn {turn}")


CAPTURED_FIRST = """
import sys
import torch
import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import open_search

NHWC = torch.channels_last
problem = ca.ConvProblem(
    "fprop", (16, 64, 56, 56), (64, 64, 3, 3), padding=1, dtype=torch.float16, memory_format=NHWC
)
((plan, error),) = open_search(problem, 0).build_many([sys.argv[1]], 1)
x, w, y = (
    torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=NHWC)
    for shape in (problem.input_shape, problem.weight_shape, problem.output_shape)
)
_C.execute(plan, x, w, y)
torch.cuda.synchronize()
expected = y.clone()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    _C.execute(plan, x, w, y)
everything, left = _C.workspace_pages(0)
y.fill_(float("nan"))
graph.replay()
torch.cuda.synchronize()
torch.testing.assert_close(y, expected)
print(everything - left)
"""


def test_a_capture_after_one_call_has_a_page(engine_text: str, pages: int) -> None:
    """That call began the measurement, and had no page itself: nobody has asked since."""
    done = python("-c", CAPTURED_FIRST, engine_text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "1"


def test_more_graphs_than_pages(
    problem: ca.ConvProblem, engine_text: str, pages: int, new_stream: torch.cuda.ExternalStream
) -> None:
    """The last ones' workspaces are of the caching allocator, as all others are."""
    calls, stream, before = warmed_up(problem, engine_text)
    graphs = [captured(calls, stream) for _ in range(pages + 3)]
    assert unused() == 0
    for index in (0, pages // 2, pages, pages + 2):
        calls.y.fill_(float("nan"))
        graphs[index].replay()
        torch.cuda.synchronize()
        calls.check(1.0, f"graph {index}")
    with torch.cuda.stream(new_stream):
        calls.launch(-2.0)
    torch.cuda.synchronize()
    calls.check(-2.0, "eagerly")
    del graphs
    assert comes_to(unused, before)


COMPILED = """
import sys
import torch
import cudnn_autotune as ca
from cudnn_autotune import _C

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = ca.Conv2d(64, 64, 3, padding=1, sampling="heuristic")
        self.second = ca.Conv2d(64, 64, 3, padding=1, sampling="heuristic")

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

ca.pin(ca.ConvProblem(
    "fprop", (16, 64, 56, 56), (64, 64, 3, 3), padding=1, dtype=torch.float16,
    memory_format=torch.channels_last,
), sys.argv[1])
torch.manual_seed(0)
net = Net().to("cuda", torch.float16, memory_format=torch.channels_last).eval()
compiled = torch.compile(net, mode="reduce-overhead")
with torch.no_grad():
    for _ in range(5):
        x = torch.randn(16, 64, 56, 56, device="cuda", dtype=torch.float16)
        x = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(compiled(x).clone(), net(x), rtol=1e-2, atol=1e-2)
print(*_C.workspace_pages(0))
"""


def test_the_first_call_within_graphs_of_torch_compile(pages: int, engine_text: str) -> None:
    """It runs while the caching allocator is redirected to a pool that must not keep anything."""
    done = python("-c", COMPILED, engine_text)
    assert done.returncode == 0, done.stderr
    *_, count, left = done.stdout.split()
    assert int(count) > int(left)
