"""The calls of one rank take turns: those of several threads run one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cudnn_autotune.distributed.group import Group
from cudnn_autotune.distributed.verdict import DistributedTuningError


class _Turn:
    """The turn of one group, which one thread has at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_in_call = False
        """True while the thread that has the turn is in a call."""


_turns: dict[str, _Turn] = {}
"""By the name of the group."""


@contextmanager
def turn_of(group: Group, timeout_s: float) -> Iterator[_Turn]:
    """A context manager for the turn of this process's calls in a group, for which other threads
    wait. A thread that has it may take it again.

    Raises:
        DistributedTuningError: other threads have had it for ``timeout_s`` seconds.
    """
    turn = _turns.setdefault(group.name, _Turn())
    if not turn.lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
        reason = f"timeout: another thread of it has been in a call for {timeout_s:g} s"
        raise DistributedTuningError(group.global_rank, reason)
    try:
        yield turn
    finally:
        turn.lock.release()


@contextmanager
def call_of(group: Group, timeout_s: float) -> Iterator[None]:
    """A context manager for one call, in its turn (:func:`turn_of`).

    Raises:
        DistributedTuningError: as :func:`turn_of`, or this thread is in a call of the group.
    """
    with turn_of(group, timeout_s) as turn:
        if turn.is_in_call:
            reason = "it makes a call of the group within another one, of which this is a part"
            raise DistributedTuningError(group.global_rank, reason)
        turn.is_in_call = True
        try:
            yield
        finally:
            turn.is_in_call = False


os.register_at_fork(after_in_child=_turns.clear)
