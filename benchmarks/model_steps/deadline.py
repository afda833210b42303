"""Ends what takes too long, so that a process measures what it has before it is killed."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any


class TimeIsUpError(BaseException):
    """What a deadline raises. No ``Exception``, so that no library takes it for a fault of its
    own and goes on."""


class Deadline:
    """A time, ``after_s`` seconds from now, beyond which `kept` lets nothing run."""

    def __init__(self, after_s: float) -> None:
        self._end = time.monotonic() + after_s

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Runs a block of the main thread.

        Raises:
            TimeIsUpError: within the block, when the time has come or was over before.
        """

        def raise_it(*_: Any) -> None:
            raise TimeIsUpError

        before = signal.signal(signal.SIGALRM, raise_it)
        try:
            # No less than a moment: 0 would set no timer.
            signal.setitimer(signal.ITIMER_REAL, max(self._end - time.monotonic(), 1e-6))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
