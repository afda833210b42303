"""Signals that end a process, raised as interrupts, so that it clears its children and files."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_as_by_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt within the context. The process dies by the
    signal once the context is over; a second signal ends it at once.

    Signals that the program handles or ignores stay as they are. In another thread than the main
    one, where Python handles no signals, the context has no effect.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()
        raise KeyboardInterrupt

    def restore() -> None:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)

    for one in taken:
        signal.signal(one, interrupt)
    try:
        yield
    finally:
        restore()
        if received:
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            os.kill(os.getpid(), received[0])
