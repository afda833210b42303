"""Changes to stores that a thread makes while others wait for it, put off until they need not.

The lock of a store's file may be held by a process that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Change = Callable[[], object]


class _Thread(threading.local):
    put_off: list[Change] | None = None


_thread = _Thread()


def change(make: Change) -> None:
    """Calls ``make`` now, or after the :func:`put_off` that this thread is in."""
    if _thread.put_off is None:
        make()
    else:
        _thread.put_off.append(make)


@contextmanager
def put_off() -> Iterator[list[Change]]:
    """The changes of the ``with`` block, for :func:`make_all` after it; those of a block within
    another one are the outer one's. If the block raises they are made at once."""
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
    for make in changes:
        make()
