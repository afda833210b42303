"""The stopwatch of the GPU: events before and after its work."""

from __future__ import annotations

from types import TracebackType

import torch

CYCLES_PER_S = 2e9
"""The assumed clock in Hz of a GPU that spins."""


class Stopwatch:
    """A stopwatch for the GPU's time in a ``with`` block, on the current stream."""

    uses = 0
    """Number of measurements in this process, those of programs by the host's clock among them."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> Stopwatch:
        Stopwatch.uses += 1
        self._begin.record()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.record()

    def has_begun(self) -> bool:
        """Returns whether the GPU has come to the block."""
        return self._begin.query()

    def ms(self) -> float:
        """Returns the milliseconds of the block; the host waits for its end."""
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


def occupy(seconds: float) -> None:
    """Lets the current stream spin for about this time, so that the host gets ahead of it."""
    torch.cuda._sleep(int(CYCLES_PER_S * seconds))
