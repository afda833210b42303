"""Locks that a forked process finds free: of modules, and the one of stores."""

from __future__ import annotations

import os
import threading

_locks: list[ForkSafeLock] = []


class ForkSafeLock:
    """A lock for a ``with`` statement, which a child process finds free.

    A child process has none of the other threads of its parent, so a lock that one of them holds
    during the fork would never be released there. What such a lock guards must be usable after each
    single step of a change. The locks are not freed, so each belongs to a module.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.append(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire_now(self) -> bool:
        """Takes the lock if it is free, and returns whether it was; :meth:`release` ends that."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Makes the lock free, whoever holds it."""
        self._lock = threading.Lock()


def _after_fork() -> None:
    for lock in _locks:
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)

LOCK = threading.RLock()
"""Guards what threads of this process share of stores, and of plans that are made ahead.

``os.fork`` acquires it first, and so waits until no other thread holds it: what such a thread does
to a file would never be completed in the child.
"""

os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
