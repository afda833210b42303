"""Deferral of changes until a thread no longer makes other threads wait.

A thread that tunes holds a mutex that other threads need. A change to a store waits for the lock of
its file, which a hanging process may hold. A user's callback may wait for a lock that another
thread holds while it convolves. So the thread makes the change, and calls the callback, after it
has released the mutex.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Change = Callable[[], object]

_log = logging.getLogger(__name__)


class _Thread(threading.local):
    put_off: list[Change] | None = None


_thread = _Thread()


def change(*changes: Change) -> None:
    """Makes changes now or, if this thread is within :func:`put_off`, adds them to the list."""
    for make in changes:
        if _thread.put_off is None:
            make()
        else:
            _thread.put_off.append(make)


@contextmanager
def put_off() -> Iterator[list[Change]]:
    """Collects the changes of the ``with`` block in a list, for a later :func:`make_all`.

    A block within another one adds its changes to the outer block's list. If the block raises, its
    changes are made at once.
    """
    if _thread.put_off is not None:
        yield []
        return
    changes = _thread.put_off = []
    try:
        yield changes
    except BaseException:
        _thread.put_off = None
        make_all(changes)
        raise
    finally:
        _thread.put_off = None


def make_all(changes: Iterable[Change]) -> None:
    """Makes the changes that :func:`put_off` collected. A failure is logged. It does not stop the
    others, nor reach the caller, whose call is served."""
    for make in changes:
        try:
            make()
        except Exception:
            _log.exception("what was put off until a search was over has failed")
