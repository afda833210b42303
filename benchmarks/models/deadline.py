"""The end of long work, so that a process measures its ready parts before it is killed."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any


class TimeIsUpError(BaseException):
    """The time has come. No ``Exception``, so that no library takes it for a fault of its own and
    goes on."""


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """Runs a block of the main thread until ``end`` at most, in seconds of `time.monotonic`.

    Raises:
        TimeIsUpError: within the block, at ``end``, or at once if that is over.
    """

    def raise_it(*_: Any) -> None:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        # No less than a moment: 0 would set no timer.
        signal.setitimer(signal.ITIMER_REAL, max(end - time.monotonic(), 1e-6))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
