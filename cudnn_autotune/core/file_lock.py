"""Locks of files against other processes and threads. A process that ends releases its locks."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_POLL_S = 0.005

_descriptors: set[int] = set()


@contextmanager
def locked(descriptor: int, timeout_s: float) -> Iterator[None]:
    """Holds the lock of an open file, and closes the file at the end.

    An error of the release, as network file systems report it, is not raised: the protected work is
    done by then. Closing the file releases the lock in any case.

    Args:
        descriptor: The file, opened for writing, which some network file systems ask for.
        timeout_s: The most seconds to wait for the lock.

    Raises:
        TimeoutError: Another process or thread held the lock for all that time.
        OSError: The file system cannot lock the file.
    """
    _descriptors.add(descriptor)
    try:
        _lock(descriptor, time.monotonic() + timeout_s)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        _descriptors.discard(descriptor)
        with suppress(OSError):
            os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError("another process holds the lock of the file") from None
        time.sleep(_POLL_S)


def _after_fork() -> None:
    """Closes a child's inherited descriptors: they would keep a killed parent's locks."""
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_after_fork)
