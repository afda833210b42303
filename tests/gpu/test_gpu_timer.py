"""The timer of a GPU that is here: what it builds, runs and reads, on small problems."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.references import assert_close, random_operands, reference, tolerance
from support.processes.subprocesses import evaluate
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import OWN_PATH, open_search
from cudnn_autotune.engines.unlisted import MATMUL, other_kernels
from cudnn_autotune.timers.gpu_timer import GpuTimer, Operands
from cudnn_autotune.timers.telemetry import Board, PowerWatch
from cudnn_autotune.timers.timer import Batch, Cache, Sample

pytestmark = pytest.mark.alone

NHWC = torch.channels_last
OPS = ("fprop", "dgrad", "wgrad")
CACHES: tuple[Cache, ...] = ("cold", "hot")

# Some 10 us on a large GPU: below what is replayed from graphs.
DENSE: dict[str, Any] = {
    "input_shape": (16, 64, 28, 28), "weight_shape": (64, 64, 3, 3), "padding": 1,
    "dtype": torch.float16, "memory_format": NHWC,
}  # fmt: skip
POINTWISE: dict[str, Any] = {
    "input_shape": (8, 64, 14, 14), "weight_shape": (96, 64, 1, 1),
    "dtype": torch.float16, "memory_format": NHWC,
}  # fmt: skip

SLACK = 1 << 18  # bytes that CUDA graphs may keep for the random number generator

Open = Callable[[ca.ConvProblem], GpuTimer]


@pytest.fixture
def open_timer() -> Iterator[Open]:
    """Opens timers, and closes them after the test."""
    opened: list[GpuTimer] = []

    def on_random_operands(problem: ca.ConvProblem) -> GpuTimer:
        opened.append(GpuTimer.open(problem))
        return opened[-1]

    yield on_random_operands
    for timer in opened:
        timer.close()


def tensors_of(problem: ca.ConvProblem) -> tuple[Operands, Tensor, Tensor]:
    """(x, w, y) with NaN in the one that is written; that one; and what it must become."""
    a, b = random_operands(problem, "cuda")
    shapes = {
        "fprop": problem.output_shape,
        "dgrad": problem.input_shape,
        "wgrad": problem.weight_shape,
    }
    written = torch.full(shapes[problem.op], math.nan, dtype=problem.dtype, device="cuda")
    written = written.contiguous(memory_format=problem.memory_format)
    tensors = {"fprop": (a, b, written), "dgrad": (written, b, a), "wgrad": (b, written, a)}
    return tensors[problem.op], written, reference(problem, a, b)


def check_samples(samples: list[Sample], timer: GpuTimer) -> None:
    highest = timer.state().max_clock_mhz or 5000.0
    for sample in samples:
        assert not sample.error
        assert 0 < sample.time_ms < 1000
        assert sample.clock_mhz is None or 100 < sample.clock_mhz < 1.05 * highest


@pytest.mark.parametrize("op", OPS)
def test_times_and_clocks_are_plausible(op: str, open_timer: Open) -> None:
    problem = ca.ConvProblem(op, **DENSE)
    timer = open_timer(problem)
    candidates = [*timer.runnable(ca.expert.candidates(problem)[:4]), OWN_PATH]
    assert len(candidates) >= 3
    start_ms = timer.elapsed_ms()
    for calls in (1, 7):
        for cache in CACHES:
            batches = [Batch(c, calls, cache) for c in candidates]
            timer.run(batches)  # loads the kernels
            samples = timer.run(batches * 2)
            assert len(samples) == 2 * len(batches)
            check_samples(samples, timer)
    assert timer.elapsed_ms() > start_ms


FIRST_RUNS = """
import json, torch
import cudnn_autotune as ca
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.timer import Batch

torch.backends.cudnn.allow_tf32 = True
problem = ca.ConvProblem(
    "fprop", (32, 64, 28, 28), (64, 64, 3, 3), padding=1, dtype=torch.float32,
    memory_format=torch.channels_last,
)
timer = GpuTimer.open(problem)
listed = [c for c in ca.expert.candidates(problem) if c.heuristic_mode == "A" and not c.is_compiled]
runs = []
for candidate in timer.runnable(listed)[:12]:
    pair = [timer.run([Batch(candidate, 1, "hot")])[0] for _ in range(2)]
    runs.append([[s.time_ms, s.loading_ms] for s in pair if not s.error])
print(json.dumps(runs))
"""


def test_loading_a_kernel_is_told_apart_from_its_first_run() -> None:
    """In a process that has run none before; it takes a hundred times as long as the kernel."""
    runs = [run for run in json.loads(evaluate(FIRST_RUNS)) if run]
    assert len(runs) > 3
    assert all(first_ms > 0 for (first_ms, _), _ in runs)
    assert all(loading_ms == 0 for _, (_, loading_ms) in runs)
    (first_ms, loading_ms), _ = runs[0]
    assert loading_ms > first_ms


def test_a_graph_of_calls_takes_what_single_calls_take(open_timer: Open) -> None:
    problem = ca.ConvProblem("fprop", **DENSE)
    timer = open_timer(problem)
    candidates = timer.runnable(ca.expert.candidates(problem)[:3])
    for candidate in candidates:
        for cache in CACHES:
            medians = []
            for calls in (1, 32):
                timer.run([Batch(candidate, calls, cache)] * 5)
                samples = timer.run([Batch(candidate, calls, cache)] * 15)
                check_samples(samples, timer)
                medians.append(statistics.median(s.time_ms for s in samples))
            single, graph = medians
            assert graph < 3 * single, (candidate.text, cache)
            assert single < 3 * graph, (candidate.text, cache)


@pytest.mark.parametrize("op", OPS)
def test_runs_write_the_output_and_nothing_else(op: str) -> None:
    problem = ca.ConvProblem(op, **POINTWISE)
    operands, written, expected = tensors_of(problem)
    before = [t.clone() for t in operands]
    timer = GpuTimer(problem, open_search(problem, torch.cuda.current_device()), operands)
    try:
        for candidate in [*timer.runnable(ca.expert.candidates(problem)[:3]), MATMUL]:
            for batch in (Batch(candidate, 1, "hot"), Batch(candidate, 5, "hot")):
                for repeat in range(2):  # the second run of many calls is a graph's
                    written.fill_(math.nan)
                    torch.cuda.synchronize()
                    check_samples(timer.run([batch]), timer)
                    what = f"{candidate.text}, {batch.calls} calls, run {repeat}"
                    assert_close(written, expected, tolerance(problem.dtype), what)
        written.fill_(math.nan)
        torch.cuda.synchronize()
        check_samples(timer.run([Batch(MATMUL, 5, "cold"), Batch(OWN_PATH, 5, "cold")]), timer)
        for now, then in zip(operands, before, strict=True):
            assert now is written or torch.equal(now, then)
    finally:
        timer.close()


GEOMETRIES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "contiguous_fp32": {
        "input_shape": (2, 8, 12, 11), "weight_shape": (6, 8, 3, 2), "padding": (1, 0),
        "dtype": torch.float32, "allow_tf32": False,
    },
    "asymmetric": {
        "input_shape": (2, 8, 12, 11), "weight_shape": (6, 8, 3, 3), "padding": (0, 2, 1, 0),
        "dtype": torch.float16, "memory_format": NHWC,
    },
    "strided_groups": {
        "input_shape": (2, 8, 13, 12), "weight_shape": (12, 2, 3, 3), "stride": 2, "groups": 4,
        "dilation": (1, 2), "padding": 1, "dtype": torch.bfloat16,
    },
    "depthwise": {
        "input_shape": (4, 16, 14, 14), "weight_shape": (16, 1, 3, 3), "groups": 16, "padding": 1,
        "dtype": torch.float16,
    },
    "one_dimension": {
        "input_shape": (4, 16, 50), "weight_shape": (8, 16, 5), "dtype": torch.float16,
    },
    "three_dimensions": {
        "input_shape": (2, 8, 6, 7, 8), "weight_shape": (8, 8, 3, 3, 3), "padding": 1,
        "dtype": torch.float16, "memory_format": torch.channels_last_3d,
    },
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_pytorchs_own_path(
    name: str, op: str, open_timer: Open, cudnn_flags: Callable[..., None]
) -> None:
    problem = ca.ConvProblem(op, **GEOMETRIES[name])
    cudnn_flags(allow_tf32=False)
    operands, written, expected = tensors_of(problem)
    result = _C.execute(_C.build_plan(problem.native(), "aten", 0), *operands)
    assert result.is_contiguous(memory_format=problem.memory_format)
    assert bool(written.isnan().all()), "the result is a tensor of its own"
    assert_close(result, expected, tolerance(problem.dtype), name)
    timer = open_timer(problem)
    for cache in CACHES:
        check_samples(timer.run([Batch(OWN_PATH, 1, cache), Batch(OWN_PATH, 4, cache)] * 2), timer)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("input_shape", "weight_shape", "memory_format"),
    [
        ((8, 64, 14, 14), (96, 64, 1, 1), NHWC),
        ((3, 24, 7, 5), (1, 24, 1, 1), NHWC),
        ((3, 1, 7, 5), (40, 1, 1, 1), NHWC),
        ((4, 32, 1, 1), (16, 32, 1, 1), NHWC),
        ((2, 16, 4, 5, 6), (24, 16, 1, 1, 1), torch.channels_last_3d),
    ],
)
def test_matrix_product(
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    memory_format: torch.memory_format,
    dtype: torch.dtype,
    op: str,
    open_timer: Open,
) -> None:
    problem = ca.ConvProblem(
        op, input_shape, weight_shape, dtype=dtype, memory_format=memory_format
    )
    assert _C.is_matmul(problem.native())
    operands, written, expected = tensors_of(problem)
    _C.execute(_C.build_plan(problem.native(), "matmul", 0), *operands)
    assert_close(written, expected, tolerance(dtype), problem.text)
    timer = open_timer(problem)
    for cache in CACHES:
        check_samples(timer.run([Batch(MATMUL, 1, cache), Batch(MATMUL, 4, cache)] * 2), timer)


def test_what_does_not_build_is_not_runnable(open_timer: Open) -> None:
    problem = ca.ConvProblem("dgrad", **DENSE)
    timer = open_timer(problem)
    listed = ca.expert.candidates(problem)[:5]
    first = listed[0]
    broken = [
        replace(first, engine=9999, text="eng9999"),
        replace(first, text=f"eng{first.engine}:KERNEL_CFG=99999"),
    ]
    ready = timer.runnable([broken[0], *listed, broken[1], OWN_PATH])
    assert ready
    assert ready[-1] == OWN_PATH
    assert ready[:-1] == [c for c in listed if c in ready]
    assert {c.text for c in ready} == timer.plans.keys()
    # With a limit, what does not build does not count, and the rest is not built.
    other = open_timer(problem)
    assert other.runnable([broken[0], *ready], limit=2) == ready[:2]
    assert len(other.plans) == 2


@pytest.mark.compiles
def test_compiled_engines_build_in_the_background(open_timer: Open) -> None:
    for op in ("dgrad", "wgrad", "fprop"):
        problem = ca.ConvProblem(
            op, **{**DENSE, "input_shape": (32, 128, 28, 28), "weight_shape": (128, 128, 3, 3)}
        )
        listed = [c for c in ca.expert.candidates(problem) if c.is_compiled]
        if listed:
            break
    else:
        pytest.skip("this cuDNN lists no engine that is compiled at run time")
    compiled = [*listed, *other_kernels(listed)][:6]
    timer = open_timer(problem)
    start_ms = timer.elapsed_ms()
    timer.prepare(compiled)
    prepared_ms = timer.elapsed_ms() - start_ms
    (plain,) = timer.runnable(
        [c for c in ca.expert.candidates(problem) if not c.is_compiled], limit=1
    )
    check_samples(timer.run([Batch(plain)] * 2), timer)  # meanwhile
    ready = timer.runnable(compiled)
    assert {c.text for c in listed[:6]} & {c.text for c in ready}
    assert prepared_ms < 0.5 * (timer.elapsed_ms() - start_ms), "prepare() waited"
    timer.run([Batch(c) for c in ready])
    check_samples(timer.run([Batch(c, 3, cache) for c in ready for cache in CACHES]), timer)
    a, b = random_operands(problem, "cuda")
    expected = reference(problem, a, b)
    for candidate in ready[:2]:
        output = ca.expert.execute(problem, candidate.text, a, b)
        assert_close(output, expected, tolerance(problem.dtype), candidate.text)


@pytest.mark.parametrize("as_graph", [False, True], ids=["calls", "graph"])
def test_calls_go_round_the_places_that_a_workspace_leaves(
    as_graph: bool, open_timer: Open
) -> None:
    problem = ca.ConvProblem("fprop", **DENSE)
    timer = open_timer(problem)
    page, places = _C.PlanTimer.PLACE_BYTES, _C.PlanTimer.PLACES
    plans = {c.text: timer.plans[c.text] for c in timer.runnable(ca.expert.candidates(problem))}
    small = {text: plan for text, plan in plans.items() if 0 < plan.workspace_bytes <= page}
    if not small:
        pytest.skip("no engine here needs a small workspace")
    operands, written, expected = tensors_of(problem)
    block = torch.empty(places * page, dtype=torch.uint8, device="cuda")
    seen = set()
    for text, plan in small.items():
        need = plan.workspace_bytes
        for had, most in ((places * page, places), (3 * page + need, 4), (need + page - 1, 1)):
            native = _C.PlanTimer(problem.native(), [operands], 0, workspace_pages=False)
            native.set_workspace(block[:had])
            block.fill_(0xA5)
            written.fill_(math.nan)
            torch.cuda.synchronize()
            ((*_, error),) = native.run([(native.add(plan), places, False, as_graph)], 0)
            assert not error
            assert_close(written, expected, tolerance(problem.dtype), text)
            used = block.view(places, page) != 0xA5
            assert not used[:, need:].any(), f"{text} wrote beside its workspace"
            rows = int(used.any(dim=1).sum())
            assert rows in (0, most), text  # some ask for memory that they leave alone
            seen.add(rows)
    assert places in seen


def test_a_larger_workspace_takes_the_place_of_the_one_before(open_timer: Open) -> None:
    """At no moment is there memory for both."""
    # Its tensors are to be brought into another layout: some engines want a workspace as large.
    problem = ca.ConvProblem(
        "fprop", (32, 256, 56, 56), (256, 256, 3, 3), padding=1, dtype=torch.float16
    )
    timer = open_timer(problem)
    timer.run([Batch(OWN_PATH)])
    without = torch.cuda.memory_allocated()
    grown = 0
    for candidate in sorted(ca.expert.candidates(problem), key=lambda c: c.workspace_bytes):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if not timer.runnable([candidate]):
            continue
        after = torch.cuda.memory_allocated()
        assert torch.cuda.max_memory_allocated() <= max(before, after) + SLACK
        grown += after > before + SLACK and before > without + SLACK
        timer.run([Batch(candidate)])  # loads the kernel
        check_samples(timer.run([Batch(candidate)] * 2), timer)
    if not grown:
        pytest.skip("no two engines here need workspaces of sizes that differ much")


@pytest.mark.parametrize("technique", ["sample_once", "median_of_three", "till_stable"])
def test_cudnns_own_search(technique: str, open_timer: Open) -> None:
    problem = ca.ConvProblem("fprop", **DENSE)
    timer = open_timer(problem)
    ready = timer.runnable(ca.expert.candidates(problem)[:6])
    found = timer.frontend_find(technique, ready, 0)
    assert {entry.candidate.text for entry in found.ranking} <= {c.text for c in ready}
    times = [entry.time_ms for entry in found.ranking if entry.time_ms is not None]
    assert len(times) == len(found.ranking) >= 1
    assert times == sorted(times)
    assert all(0 < t < 1000 for t in times)
    assert found.total_samples >= sum(entry.samples for entry in found.ranking)
    assert 1 <= len(timer.frontend_find(technique, ready, 2).ranking) <= 2


def test_the_power_is_told_where_a_reading_fell(open_timer: Open) -> None:
    """About ten readings a second on a board that is held at its limit; none on one that is not,
    and none in what is over at once."""
    gpu = Board.of(torch.cuda.current_device())
    limit_w = gpu.state().power_limit_w
    if gpu.instant_power_w() is None or limit_w is None:
        pytest.skip("NVML tells no instant power of this GPU")
    problem = ca.ConvProblem(
        "fprop", **{**DENSE, "input_shape": (256, 512, 28, 28), "weight_shape": (512, 512, 3, 3)}
    )
    timer = open_timer(problem)
    candidate, *_ = timer.runnable(ca.expert.candidates(problem, device="cuda"), 1)
    (first,) = timer.run([Batch(candidate, 10)])
    calls = max(1, round(5.0 / first.time_ms))
    with PowerWatch(gpu) as watch:
        samples = timer.run([Batch(candidate, calls, "hot")] * 160)
    elapsed_ms = calls * sum(sample.time_ms for sample in samples)
    assert len(watch.readings) >= elapsed_ms / 100 / 3
    assert all(0.05 * limit_w < reading.power_w < 1.5 * limit_w for reading in watch.readings)
    values = [sample.power_w for sample in samples if sample.power_w is not None]
    capped = [reading for reading in watch.readings if reading.is_capped]
    assert len(set(values)) <= len(capped) + 1, "the timer's own watch may have seen one more"
    assert len(set(values)) >= len(capped) - 3, "all but what began before, or ended after"
    assert len(values) < len(samples) / 2, "a window is a quarter of the time"
    assert all(s.power_w is None for s in timer.run([Batch(candidate, calls, "hot")] * 3))
