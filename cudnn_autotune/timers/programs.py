"""The stopwatch for programs that compute the same: they take turns, in calls or in CUDA graphs.

A program that communicates with other processes must not be timed: all of them have to run it
equally often, or one waits for the others for ever.
"""

from __future__ import annotations

import math
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cudnn_autotune.timers.stopwatch import Stopwatch, occupy

Run = Callable[..., Any]

CUDA_GRAPH_TREES = "torch._inductor.cudagraph_trees"  # importing it takes seconds

_WARMUP_CALLS = 3  # Inductor records a CUDA graph at the second call, and replays it at the third.
_ROUNDS = 7
_BATCH_MS = 20.0
_MOST_CALLS = 200
MOST_AHEAD_S = 0.5
"""The longest time, in seconds, for which the GPU spins until the host is ahead of it."""
QUEUE_MS = 4.0
"""Milliseconds of a batch whose launches fit into the GPU's queue of about a thousand."""
CAPTURED_CALLS = 10
"""Calls of a program in its CUDA graph (:func:`captured_in_turns`)."""
_CAPTURED_ROUNDS = 9


def time_in_turns(
    programs: Mapping[str, Run],
    inputs: Sequence[Any],
    on_gpu: bool,
    *,
    with_host: bool = True,
    batch_ms: float = _BATCH_MS,
    rounds: int = _ROUNDS,
    warmup_calls: int = _WARMUP_CALLS,
) -> dict[str, float]:
    """Returns the milliseconds of a call of each program, after some untimed calls of each.

    The first program's time is its median. Another one's is that median times the median of their
    ratios within a round: between rounds the clock may drift by more than the programs differ.

    Args:
        with_host: whether the GPU's waits for the host count. Else the GPU gets most of a call's
            work before it begins.
        batch_ms: milliseconds that a program runs in its turn, in one call at least.
        rounds: number of turns of each program.
        warmup_calls: number of untimed calls of each; 0 if all have just run.
    """
    calls, ahead_s = {}, dict.fromkeys(programs, 0.0)
    samples: dict[str, list[float]] = {name: [] for name in programs}
    with own_steps():
        for name, program in programs.items():
            for _ in range(warmup_calls):
                _batch_ms(program, inputs, 1, on_gpu)
            once = max(_batch_ms(program, inputs, 1, on_gpu), 1e-3)
            calls[name] = max(1, min(math.ceil(batch_ms / once), _MOST_CALLS))
            if on_gpu and not with_host:
                ahead_s[name] = min(1e-3 * once * calls[name], MOST_AHEAD_S)
        for round in range(rounds):
            names = list(programs)
            for name in names if round % 2 else reversed(names):
                batch = _batch_ms(programs[name], inputs, calls[name], on_gpu, ahead_s[name])
                samples[name].append(batch / calls[name])
    return paired(samples)


def paired(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the times as :func:`time_in_turns`, from samples by round."""
    first = next(iter(samples.values()), ())
    return {
        name: statistics.median(first) * statistics.median(map(operator.truediv, values, first))
        for name, values in samples.items()
    }


def _batch_ms(
    program: Run, inputs: Sequence[Any], calls: int, on_gpu: bool, ahead_s: float = 0.0
) -> float:
    """Returns the time of some calls one after another, with the GPU's waits for the host.

    Args:
        ahead_s: seconds for which the GPU is kept busy first, and the host gets ahead; they do not
            count.
    """
    if on_gpu:
        torch.cuda.synchronize()
    if ahead_s:
        occupy(ahead_s)
        with Stopwatch() as watch:
            for _ in range(calls):
                begin_step()
                program(*inputs)
        return watch.ms()
    Stopwatch.uses += 1
    start = time.perf_counter()
    for _ in range(calls):
        begin_step()
        program(*inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def captured_in_turns(
    programs: Sequence[Callable[[Any], None]], sets: Sequence[Any]
) -> list[float]:
    """Returns the median time of a call of each program, in milliseconds. They take turns, in CUDA
    graphs, and rotate over the sets of operands. The first call of each chooses its engine."""
    graphs = []
    for program in programs:
        program(sets[0])
        graph = torch.cuda.CUDAGraph()
        # Without a stream PyTorch takes one that it keeps, on the GPU of the first capture. Other
        # threads may compile and load kernels during the capture.
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(CAPTURED_CALLS):
                program(sets[i % len(sets)])
        graphs.append(graph)
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(_CAPTURED_ROUNDS + 1):
        for graph, times in zip(graphs, samples, strict=True):
            with Stopwatch() as watch:
                graph.replay()
            times.append(watch.ms() / CAPTURED_CALLS)
    return [statistics.median(times[1:]) for times in samples]


def begin_step() -> None:
    """Lets Inductor's CUDA graphs, if any, overwrite the outputs of the last call."""
    if CUDA_GRAPH_TREES in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()


@contextmanager
def own_steps() -> Iterator[None]:
    """Takes back the marks of begun steps. After a first mark Inductor's CUDA graphs no longer
    begin steps themselves: a program without marks would be recorded at each call."""
    trees = sys.modules.get(CUDA_GRAPH_TREES)
    before = trees.MarkStepBox.mark_step_counter if trees is not None else 0
    try:
        yield
    finally:
        if CUDA_GRAPH_TREES in sys.modules:
            sys.modules[CUDA_GRAPH_TREES].MarkStepBox.mark_step_counter = before
