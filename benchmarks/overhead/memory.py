"""Host memory of a process that runs many shapes, forward and backward."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHANNELS = 16


def resident_kb() -> dict[str, int]:
    """Resident memory of this process by kind, in KiB, as far as /proc says."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("VmRSS", "VmHWM", "RssAnon", "RssFile", "RssShmem"):
            found[key] = int(value.split()[0])
    return found


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: one record at the start (after one shape has loaded the libraries) and one
    every `step` shapes. `implementation` is "ours", "ours, forward only" or "pytorch"
    (benchmark=True)."""
    import torch

    import cudnn_autotune as ca

    device, dtype = request["device"], getattr(torch, request["dtype"])
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.benchmark_limit = request["memory_benchmark_limit"]
    ours = request["implementation"].startswith("ours")
    forward_only = request["implementation"].endswith("forward only")
    ca.set_sampling(request["memory_sampling"])
    ca.set_benchmark_limit(request["memory_benchmark_limit"])
    kind: Any = ca.Conv2d if ours else torch.nn.Conv2d
    module = kind(CHANNELS, CHANNELS, 3, padding=1, bias=False)
    module = module.to(device=device, dtype=dtype, memory_format=torch.channels_last)
    side = 40
    biggest = side + request["memory_shapes"] // side
    # One buffer for all: the allocator's caches must not grow with the shapes.
    buffer = torch.randn(2 * CHANNELS * (16 + side) * (16 + biggest), device=device).to(dtype)

    def run(index: int) -> None:
        height, width = 16 + index % side, 16 + index // side
        flat = buffer[: 2 * CHANNELS * height * width]
        x = flat.view(2, height, width, CHANNELS).permute(0, 3, 1, 2).detach()
        if forward_only:
            with torch.no_grad():
                module(x)
            return
        y = module(x.requires_grad_())
        torch.autograd.grad(y, (x, module.weight), y.detach())

    def record(shapes: int) -> dict[str, Any]:
        if device == "cuda":
            torch.cuda.synchronize()
        gc.collect()
        result: dict[str, Any] = {
            "shapes": shapes,
            "seconds": round(time.monotonic() - begin, 3),
            "resident_kb": resident_kb(),
        }
        if device == "cuda":
            result["device_reserved_mb"] = torch.cuda.memory_reserved() / 2**20
            result["choices"] = len(ca.choices())
        return result

    begin = time.monotonic()
    run(0)
    yield record(1)
    for index in range(1, request["memory_shapes"] + 1):
        if time.monotonic() - begin > request["seconds"]:
            yield {**record(index), "stopped": "time limit"}
            return
        run(index)
        if index % request["memory_step"] == 0 or index == request["memory_shapes"]:
            yield record(index + 1)
