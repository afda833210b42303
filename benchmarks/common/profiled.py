"""The kernels that a call runs on the GPU, as a profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Kernel(NamedTuple):
    """All launches of a kernel, or all copies of a kind."""

    name: str
    launches: int
    ms: float


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    """Returns the kernels of one call, those of the longest time first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = [
        Kernel(event.key, event.count, event.self_device_time_total / 1e3)
        for event in seen.key_averages()
        if str(event.device_type).endswith("CUDA")
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)
