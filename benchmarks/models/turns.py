"""Steps that take turns on one device, block by block."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from common.modes import synchronize

Replay = Callable[[], None]


def captured(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The step as a CUDA graph; on a CPU it is the step itself."""
    import torch

    if device == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def time_block(replay: Replay, count: int, device: str) -> float:
    """Milliseconds a step, of ``count`` one after the other: by CUDA events, or the host's clock on
    a CPU."""
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            replay()
        return (time.perf_counter() - begin) * 1e3 / count
    from cudnn_autotune.timers.stopwatch import Stopwatch

    with Stopwatch() as watch:
        for _ in range(count):
            replay()
    return watch.ms() / count


def calibrate(
    replays: dict[str, Replay], block_ms: float, least_s: float, device: str
) -> dict[str, int]:
    """Runs all in turns for ``least_s`` seconds; returns how many steps of each fill a block."""
    counts = dict.fromkeys(replays, 1)
    begin = time.monotonic()
    while True:
        for name, replay in replays.items():
            step_ms = time_block(replay, counts[name], device)
            counts[name] = max(1, round(block_ms / step_ms))
        if time.monotonic() - begin >= least_s:
            return counts


def take_turns(
    replays: dict[str, Replay], counts: dict[str, int], rounds: int, device: str
) -> dict[str, list[float]]:
    """Milliseconds a step of each, round by round.

    In each round everyone has a block. The order of a round is random, that of the next one its
    mirror image: ABBA, where there are two.
    """
    source = random.Random(0)
    order = list(replays)
    times: dict[str, list[float]] = {name: [] for name in replays}
    synchronize(device)
    for index in range(rounds):
        if index % 2:
            order.reverse()
        else:
            source.shuffle(order)
        for name in order:
            times[name].append(time_block(replays[name], counts[name], device))
    return times
