"""What a hit costs when the table of choices holds 1 problem, and when it holds 10,000."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from common import numbers

from .calls import Call, blocks, significant_spread
from .memory import resident_kb

CHANNELS = 8


def shapes(count: int) -> Iterator[tuple[int, int]]:
    """`count` distinct heights and widths, small ones first."""
    side = 1
    while side * side < count:
        side += 1
    pairs = sorted(((h, w) for h in range(side) for w in range(side)), key=sum)
    for h, w in pairs[:count]:
        yield 4 + h, 4 + w


class Convolutions:
    """Calls of tiny 1x1 convolutions of many shapes over one buffer of random data."""

    def __init__(self, request: dict[str, Any]) -> None:
        import torch

        import cudnn_autotune as ca

        self.ca = ca
        self.device, self.mode = request["device"], request["fill_sampling"]
        dtype = getattr(torch, request["dtype"])
        self.buffer = torch.randn(CHANNELS * 256 * 256, device=self.device).to(dtype)
        weight = torch.randn(CHANNELS, CHANNELS, 1, 1, device=self.device).to(dtype)
        self.weight = weight.contiguous(memory_format=torch.channels_last)

    def input(self, height: int, width: int) -> Any:
        flat = self.buffer[: CHANNELS * height * width]
        return flat.view(1, height, width, CHANNELS).permute(0, 3, 1, 2)

    def ours(self, height: int, width: int) -> Call:
        x, conv = self.input(height, width), self.ca.functional.conv2d
        return lambda: conv(x, self.weight, sampling=self.mode)

    def pytorch(self, height: int, width: int) -> Call:
        import torch

        x = self.input(height, width)
        return lambda: torch.nn.functional.conv2d(x, self.weight)

    def held(self) -> int | None:
        """Problems in the table; None where there is no table (CPU)."""
        return None if self.device == "cpu" else len(self.ca.choices())


def measure(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker: fills the table step by step; at each step times hits on the very first
    problem, and PyTorch's call as a control for the host's drift."""
    import torch

    end = time.monotonic() + request["seconds"]
    with torch.no_grad():
        conv = Convolutions(request)
        conv.ca.forget()
        targets = sorted({min(n, request["table_size"]) for n in (1, 16, 100, 1000, 10**4, 10**5)})
        order = list(shapes(request["table_size"]))
        first = conv.ours(*order[0])
        filled = 0
        fill_s = 0.0
        for target in targets:
            begin = time.monotonic()
            for shape in order[filled:target]:
                if time.monotonic() > end:
                    break
                conv.ours(*shape)()
                filled += 1
            fill_s += time.monotonic() - begin
            calls = {"pytorch": conv.pytorch(*order[0]), "first problem": first}
            times = blocks(
                calls,
                device=request["device"],
                blocks=request["blocks"],
                calls_per_block=request["calls"],
            )
            row = {
                "filled": filled,
                "held": conv.held(),
                "fill_s": numbers.significant(fill_s, 4),
                "resident_kb": resident_kb(),
                "us": {name: significant_spread(us) for name, us in times.items()},
            }
            if filled < target:
                yield {**row, "stopped": "time limit"}
                return
            yield row
