"""Times of calls that take turns: CUDA events on a GPU, the host clock on a CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

# torch.cuda._sleep spins on the SM clock; at 2 GHz this many cycles last a millisecond.
CYCLES_PER_MS = 2_000_000


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def host_ms(call: Callable[[], Any], device: str) -> float:
    """Wall time of one call and of the work it started, from an idle device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


class _CudaBatch:
    """One batch between two events, queued behind a spin: launches never starve the GPU, so
    the host's cost of a call does not show in the GPU's time for it."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def enqueue(self, call: Callable[[], Any], calls: int, spin_ms: float) -> None:
        self.torch.cuda._sleep(int(spin_ms * CYCLES_PER_MS))
        self.events[0].record()
        for _ in range(calls):
            call()
        self.events[1].record()

    def per_call_ms(self, calls: int) -> float:
        self.events[1].synchronize()
        return float(self.events[0].elapsed_time(self.events[1])) / calls


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    device: str,
    rounds: int,
    target_ms: float,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Per-call times (ms), one per round; in each round every call runs one batch, in random
    order, so that all of them meet the same clock and temperature.

    Args:
        calls: already warm (tuned) calls by name.
        target_ms: a batch holds as many calls as fill this time (1 to 100).
    """
    size: dict[str, int] = {}
    spin: dict[str, float] = {}
    for name, call in calls.items():
        call()
        synchronize(device)
        # 5 calls that nobody waits for, then the wait: host cost and device cost of a call.
        begin = time.perf_counter()
        for _ in range(5):
            call()
        enqueue_ms = (time.perf_counter() - begin) * 1e3 / 5
        synchronize(device)
        total_ms = (time.perf_counter() - begin) * 1e3 / 5
        size[name] = int(min(100, max(1, target_ms / max(total_ms, 1e-4))))
        # The spin covers the enqueueing of the whole batch, with margin; 20 ms at most.
        spin[name] = min(20.0, 0.05 + 1.5 * enqueue_ms * size[name])
    source = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in calls}
    batch = _CudaBatch() if device == "cuda" else None
    for _ in range(rounds):
        order = source.sample(list(calls), len(calls))
        for name in order:
            if batch is not None:
                batch.enqueue(calls[name], size[name], spin[name])
                times[name].append(batch.per_call_ms(size[name]))
            else:
                begin = time.perf_counter()
                for _ in range(size[name]):
                    calls[name]()
                times[name].append((time.perf_counter() - begin) * 1e3 / size[name])
    return times
