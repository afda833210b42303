"""Recipes on a GPU: kernels, engines of other problems and Python functions, in calls and in CUDA
graphs, on streams and threads."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.references import assert_close
from support.processes.threads import in_threads
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.recipe import (
    Address,
    EngineLaunch,
    Int64,
    Kernel,
    KernelLaunch,
    PythonLaunch,
    Recipe,
    TensorMap,
)
from cudnn_autotune.engines.recipe_plan import recipe_plan
from cudnn_autotune.timers.measuring import operands

TEXT = "mine@1:A=2"
PROBLEM = ca.ConvProblem(
    "fprop",
    (4, 32, 12, 12),
    (48, 32, 3, 3),
    padding=1,
    dtype=torch.float16,
    memory_format=torch.channels_last,
)
X, W, Y = Address("x"), Address("w"), Address("y")
# Every pixel of every channel of y, whatever the order of the dimensions.
COUNT = 4 * 48 * 12 * 12
BLOCK = 128
SOURCE = """
extern "C" __global__ void fill(unsigned short* y, long long count, int bits, float scale) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < count) y[i] = (unsigned short)(bits * (int)scale);
}
extern "C" __global__ void copy(unsigned short* y, const unsigned short* from, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] = from[i];
}
extern "C" __global__ void negate(unsigned short* y, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) y[i] ^= 0x8000;
}
extern "C" __global__ void through_shared(unsigned short* y, int words) {
  extern __shared__ int memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) y[0] = (unsigned short)(memory[words - 1] & 0xffff);
}
"""


HOPPER_SOURCE = """
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
extern "C" __global__ void copy_box(const __grid_constant__ CUtensorMap map, unsigned short* y,
                                    int column, int row, int count) {
  extern __shared__ __align__(128) unsigned short box[];
  __shared__ __align__(8) unsigned long long barrier;
  const unsigned to = (unsigned)__cvta_generic_to_shared(box);
  const unsigned arrived = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                 "r"(2 * count)
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(arrived)
        : "memory");
  }
  __syncthreads();
  for (unsigned done = 0; !done;) {
    asm volatile(
        "{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;"
        " selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(arrived)
        : "memory");
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x) y[i] = box[i];
}
extern "C" __global__ void cluster_rank(unsigned short* y) {
  unsigned rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) y[blockIdx.x] = (unsigned short)(100 * size + rank);
}
"""
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="clusters and TMA need a GPU of compute capability 9.0",
)


def kernel(
    function: str, *arguments: Any, count: int = COUNT, shared_bytes: int = 0
) -> KernelLaunch:
    grid = (-(-count // BLOCK), 1, 1)
    return KernelLaunch(Kernel(SOURCE, function), grid, (BLOCK, 1, 1), arguments, shared_bytes)


def plan(*launches: Any, workspace_bytes: int = 0, problem: ca.ConvProblem = PROBLEM) -> _C.Plan:
    return recipe_plan(problem, TEXT, Recipe(launches, workspace_bytes), 0)


def data_of(problem: ca.ConvProblem = PROBLEM, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return operands(problem, "cuda:0")


def expected(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.conv2d(x.cpu().double(), w.cpu().double(), padding=1)


@pytest.fixture(scope="module")
def engine_text() -> str:
    """Of an engine of the problem that needs a workspace, if there is one that runs."""
    found = [c for c in ca.expert.candidates(PROBLEM) if c.engine is not None]
    with_workspace = [c for c in found if c.workspace_bytes > 0 and not c.is_compiled]
    data = data_of()
    for candidate in [*with_workspace, *found]:
        try:
            one = ca.expert.build_plan(PROBLEM, candidate.text)
            _C.execute(one, *data)
        except _C.PlanError:
            continue
        return candidate.text
    raise AssertionError("no engine runs")


def engine(text: str, y: Address = Y) -> EngineLaunch:
    return EngineLaunch(PROBLEM, text, X, W, y)


# Kernels


def test_a_kernel_is_given_its_arguments() -> None:
    """A float, an int, a long long and an address; 0x3c00 is 1 in half precision."""
    x, w, y = data_of()
    one = plan(kernel("fill", Y, Int64(COUNT), 0x1E00, 2.0))
    assert (one.text, one.workspace_bytes) == (TEXT, 0)
    assert _C.execute(one, x, w, y) is y
    assert bool((y == 1).all())
    # An address behind the first element: the others stay.
    y.zero_()
    _C.execute(plan(kernel("fill", Address("y", 2 * (COUNT - 8)), Int64(8), 0x1E00, 2.0)), x, w, y)
    torch.cuda.synchronize()
    assert int((y == 1).sum()) == 8
    assert float(y.permute(0, 2, 3, 1).reshape(-1)[-8:].sum()) == 8


def test_launches_follow_each_other_through_the_workspace() -> None:
    x, w, y = data_of()
    one = plan(
        kernel("fill", Address("workspace", 512), Int64(COUNT), 0x3C00, 1.0),
        kernel("negate", Address("workspace", 512), COUNT),
        kernel("copy", Y, Address("workspace", 512), COUNT),
        workspace_bytes=512 + 2 * COUNT,
    )
    assert one.workspace_bytes == 512 + 2 * COUNT
    _C.execute(one, x, w, y)
    assert bool((y == -1).all())


def test_addresses_are_those_of_each_call() -> None:
    one = plan(kernel("fill", Y, Int64(COUNT), 0x3C00, 1.0))
    results = []
    for seed in range(3):
        x, w, y = data_of(seed=seed)
        results.append(_C.execute(one, x, w, y))
    assert all(bool((y == 1).all()) for y in results)
    assert len({y.data_ptr() for y in results}) == 3


@pytest.mark.parametrize("shared_bytes", [1024, 48 << 10, 64 << 10, "most"])
def test_a_kernel_has_the_shared_memory_that_it_asks_for(shared_bytes: int | str) -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    most = properties.shared_memory_per_block_optin
    size = most if shared_bytes == "most" else int(shared_bytes)
    if size > most:
        pytest.skip(f"this GPU has {most} bytes of shared memory for a block")
    x, w, y = data_of()
    words = size // 4
    _C.execute(plan(kernel("through_shared", Y, words, count=1, shared_bytes=size)), x, w, y)
    # Another plan of the same kernel that asks for less takes nothing from the first.
    small = plan(kernel("through_shared", Y, 4, count=1, shared_bytes=16))
    again = plan(kernel("through_shared", Y, words, count=1, shared_bytes=size))
    for one, value in ((small, 3), (again, (words - 1) & 0xFFFF)):
        _C.execute(one, x, w, y)
        assert y.view(torch.int16)[0, 0, 0, 0].item() & 0xFFFF == value


def test_too_much_shared_memory_is_refused() -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    size = properties.shared_memory_per_block_optin + 1024
    with pytest.raises(_C.PlanError, match=rf"{TEXT}.*through_shared.*CUDA_ERROR_INVALID_VALUE"):
        plan(kernel("through_shared", Y, 4, count=1, shared_bytes=size))
    test_a_kernel_is_given_its_arguments()  # and nothing is broken


@pytest.mark.parametrize(
    "arguments",
    [(Y,), (Y, 3, 4), (Y, Int64(3)), (3, Y), ()],
    ids=["too few", "too many", "a long for an int", "in another order", "none"],
)
def test_other_arguments_than_the_kernels_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(_C.PlanError, match=rf"{TEXT}.*negate takes 2 arguments of 8, 4 bytes"):
        plan(kernel("negate", *arguments))


@pytest.mark.parametrize(("grid", "block"), [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (2048, 1, 1))])
def test_a_launch_that_fails_names_the_candidate(
    grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    data = data_of()
    one = plan(replace(kernel("negate", Y, COUNT), grid=grid, block=block))
    with pytest.raises(_C.PlanError, match=rf"{TEXT}: launching negate: CUDA_ERROR_\w+"):
        _C.execute(one, *data)
    test_a_kernel_is_given_its_arguments()


def in_memory(tensor: Tensor) -> Tensor:
    """The elements of a channels_last tensor in the order of memory."""
    return tensor.permute(0, 2, 3, 1).reshape(-1)


@hopper
@pytest.mark.parametrize("suffix", ["", "a"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_grid_is_launched_in_clusters(size: int, suffix: Any) -> None:
    x, w, y = data_of()
    code = Kernel(HOPPER_SOURCE, "cluster_rank", arch_suffix=suffix)
    _C.execute(
        plan(KernelLaunch(code, (16, 1, 1), (32, 1, 1), (Y,), cluster=(size, 1, 1))), x, w, y
    )
    found = in_memory(y)[:16].view(torch.int16).tolist()
    assert found == [100 * size + block % size for block in range(16)]


@hopper
def test_tma_copies_boxes_of_each_calls_tensor() -> None:
    """A box of 16 channels of 8 pixels, the last two of which lie behind the tensor."""
    pixels = TensorMap(X, "float16", (32, 576), (64,), (16, 8))
    code = Kernel(HOPPER_SOURCE, "copy_box", arch_suffix="a")
    one = plan(KernelLaunch(code, (1, 1, 1), (128, 1, 1), (pixels, Y, 16, 570, 128), 256))
    graph = torch.cuda.CUDAGraph()
    for seed in range(3):
        x, w, y = data_of(seed=seed)
        expected_box = torch.zeros(8, 16, dtype=torch.float16, device="cuda")
        expected_box[:6] = in_memory(x).view(576, 32)[570:, 16:]
        _C.execute(one, x, w, y)
        assert torch.equal(in_memory(y)[:128].view(8, 16), expected_box)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        _C.execute(one, x, w, y)
    y.zero_()
    graph.replay()
    assert torch.equal(in_memory(y)[:128].view(8, 16), expected_box)


# Engines of other problems


def test_an_engine_computes_a_problem_of_its_own(engine_text: str) -> None:
    """Into the workspace, behind which its own lies; a kernel takes the result from there."""
    x, w, y = data_of()
    alone = ca.expert.build_plan(PROBLEM, engine_text)
    own_bytes = 2 * COUNT + 10  # no multiple of what the engine's workspace is aligned to
    one = plan(
        engine(engine_text, Address("workspace")),
        kernel("copy", Y, Address("workspace"), COUNT),
        kernel("negate", Y, COUNT),
        workspace_bytes=own_bytes,
    )
    behind = -(-own_bytes // 256) * 256
    needed = behind + alone.workspace_bytes if alone.workspace_bytes else own_bytes
    assert one.workspace_bytes == needed
    for seed in range(2):
        x, w, y = data_of(seed=seed)
        _C.execute(one, x, w, y)
        assert_close(y, -expected(x, w), 2e-3)


def test_two_engines_share_one_workspace(engine_text: str) -> None:
    x, w, y = data_of()
    one = plan(engine(engine_text, Address("workspace")), engine(engine_text),
               workspace_bytes=2 * COUNT)  # fmt: skip
    assert one.workspace_bytes == plan(engine(engine_text)).workspace_bytes + 2 * COUNT
    _C.execute(one, x, w, y)
    assert_close(y, expected(x, w), 2e-3)


# Python


def test_a_function_is_given_the_workspace(engine_text: str) -> None:
    def double(x: Tensor, w: Tensor, y: Tensor, workspace: Tensor) -> None:
        assert (workspace.dtype, workspace.numel()) == (torch.uint8, 2 * COUNT)
        result = workspace.view(torch.float16).view(4, 12, 12, 48).permute(0, 3, 1, 2)
        torch.add(result, result, out=y)

    x, w, y = data_of()
    one = plan(
        engine(engine_text, Address("workspace")),
        PythonLaunch(double),
        kernel("negate", Y, COUNT),
        workspace_bytes=2 * COUNT,
    )
    _C.execute(one, x, w, y)
    assert_close(y, -2 * expected(x, w), 2e-3)


# Graphs, streams and threads


def recipe_of_all(text: str) -> _C.Plan:
    return plan(
        engine(text, Address("workspace")),
        PythonLaunch(lambda x, w, y, workspace: y.zero_()),
        kernel("copy", Y, Address("workspace"), COUNT),
        kernel("negate", Y, COUNT),
        workspace_bytes=2 * COUNT,
    )


def test_a_graph_replays_it_after_the_plan_is_gone(engine_text: str) -> None:
    """Kernels may be unloaded with their plan; graphs keep it (csrc/core/cuda/graph_lifetime.h)."""
    x, w, y = data_of()
    one = recipe_of_all(engine_text)
    _C.execute(one, x, w, y)
    kernels_only = plan(kernel("fill", Y, Int64(COUNT), 0x3C00, 1.0), kernel("negate", Y, COUNT))
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    for graph, captured in zip(graphs, (one, kernels_only), strict=True):
        with torch.cuda.graph(graph):
            _C.execute(captured, x, w, y)
    del one, kernels_only, captured
    gc.collect()
    for seed in (1, 2):
        x.copy_(data_of(seed=seed)[0])
        y.fill_(float("nan"))
        graphs[0].replay()
        assert_close(y, -expected(x, w), 2e-3)
        graphs[1].replay()
        assert bool((y == -1).all())


def test_it_can_be_built_while_a_stream_is_captured() -> None:
    x, w, y = data_of()
    graph, built = torch.cuda.CUDAGraph(), []
    late = Kernel(SOURCE.replace("negate", "negate_late"), "negate_late")  # not loaded before
    launch = replace(kernel("negate", Y, COUNT), kernel=late)
    thread = threading.Thread(target=lambda: built.append(plan(launch)))
    with torch.cuda.graph(graph):
        y.fill_(1)
        thread.start()
        thread.join()
        _C.execute(built[0], x, w, y)
    y.zero_()
    graph.replay()
    assert bool((y == -1).all())


def test_it_runs_on_the_current_stream(engine_text: str) -> None:
    """The input is written late, on the side stream."""
    x, w, y = data_of()
    right = -expected(x, w)
    one, late, stream = recipe_of_all(engine_text), torch.zeros_like(x), torch.cuda.Stream()
    _C.execute(one, x, w, y)  # loads the kernels
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        _C.execute(one, late, w, y)
        late.zero_()
    stream.synchronize()
    assert_close(y, right, 2e-3)


def test_threads_have_plans_of_their_own(engine_text: str) -> None:
    def work(_: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x, w, y = operands(PROBLEM, "cuda:0")
            one = recipe_of_all(engine_text)
            for _ in range(20):
                _C.execute(one, x, w, y)
            torch.cuda.current_stream().synchronize()
            assert_close(y, -expected(x, w), 2e-3)

    in_threads(4, work)


@pytest.mark.parametrize("as_graph", [False, True], ids=["calls", "graph"])
def test_it_is_timed_like_any_other_plan(as_graph: bool, engine_text: str) -> None:
    x, w, y = data_of()
    plans = [recipe_of_all(engine_text), _C.build_plan(PROBLEM.native(), "aten", 0)]
    native = _C.PlanTimer(PROBLEM.native(), [(x, w, y)], 0)
    native.set_workspace(torch.empty(plans[0].workspace_bytes, dtype=torch.uint8, device="cuda"))
    numbers = [native.add(one) for one in plans]
    for (number, lead), calls in [((n, 0), 1) for n in numbers] + [((n, 1), 8) for n in numbers]:
        ((time_ms, *_, error),) = native.run([(number, calls, False, as_graph and calls > 1)], lead)
        assert not error
        assert 0 < time_ms < 1000
    failing = replace(kernel("negate", Y, COUNT), block=(2048, 1, 1))
    ((*_, error),) = native.run([(native.add(plan(failing)), 1, False, False)], 0)
    assert error.startswith(f"{TEXT}: launching negate")


def test_a_function_that_no_graph_can_capture_fails_and_leaves_no_capture_behind() -> None:
    x, w, y = data_of()
    native = _C.PlanTimer(PROBLEM.native(), [(x, w, y)], 0)
    number = native.add(plan(PythonLaunch(lambda x, *others: x.sum().item())))
    for calls, as_graph in ((1, False), (4, True), (4, False)):
        ((*_, error),) = native.run([(number, calls, False, as_graph)], 0)
        assert ("captur" in error) is as_graph
    # While a capture is under way the allocator keeps what another stream has used.
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    used = torch.empty(1 << 20, device="cuda")
    used.record_stream(torch.cuda.Stream())
    del used
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # looks for what has become free
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before
    torch.rand(1, device="cuda")  # the generator of random numbers is told that it has ended, too
