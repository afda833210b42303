"""Locks that are free in a forked process: of modules, of stores, and of late imports."""

from __future__ import annotations

import os
import threading

_locks: list[ForkSafeLock] = []


class ForkSafeLock:
    """A lock for a ``with`` statement, which is free in a child process.

    A child process has none of its parent's other threads. It would wait for ever for a lock that
    one of them holds during the fork. The guarded data must be usable after each step of a change.
    The locks are not freed, so each belongs to a module.
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
        """Makes the lock free, even if a thread holds it."""
        self._lock = threading.Lock()


def _after_fork() -> None:
    for lock in _locks:
        lock.renew()


os.register_at_fork(after_in_child=_after_fork)

LOCK = threading.RLock()
"""Guards the stores, and the plans made ahead, that threads of this process share.

``os.fork`` acquires it first, and so waits until no other thread holds it: that thread's change of
a file would never be completed in the child.
"""

os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class _Importing:
    """The lock of :data:`IMPORTING`, which a fork waits for."""

    # Most seconds that a fork waits. An import that takes longer has met a deadlock of its own.
    _PATIENCE_S = 60

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._forking = threading.local()
        os.register_at_fork(
            before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _before(self) -> None:
        self._forking.is_mine = self._lock.acquire(timeout=self._PATIENCE_S)

    def _in_parent(self) -> None:
        if self._forking.is_mine:
            self._lock.release()

    def _in_child(self) -> None:
        if self._forking.is_mine:
            self._lock.release()
        else:
            self._lock = threading.RLock()


IMPORTING = _Importing()
"""A context for imports of this package's modules within functions::

    with IMPORTING:
        from cudnn_autotune.kernels.built_in import BUILT_IN

Python frees no module's lock in a child process. A child that is forked while another thread
imports a module would wait for it for ever. So ``os.fork`` waits until no thread is in such a
context. Code that needs both enters it before ``LOCK``. Functions that run during another module's
import (:func:`~cudnn_autotune.core.after_import.after_import`) do not enter it.
"""
