"""The ranks of a process group, their store, and the turns of calls in it: calls of a rank's
threads run one after the other."""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from cudnn_autotune.distributed.outcome import DistributedTuningError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Group:
    """A process group of two or more, from the view of one of its ranks."""

    store: Store
    rank: int
    """This process's place in the group, from 0."""
    ranks: tuple[int, ...]
    """Global ranks, by place in the group."""
    name: str = ""
    """Name of the group in this process."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    @property
    def prefix(self) -> str:
        """Prefix of this package's keys in the store. It depends on the ranks: a later group of the
        same name with other ranks may use the same store."""
        ranks = hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]
        return f"cudnn_autotune/{ranks}"


def group_of(group: dist.ProcessGroup | None, timeout_s: float) -> Group | None:
    """Returns the ranks of ``group`` (None: the default group); None if this process is alone.

    Raises:
        ValueError: ``group`` is not a process group, this process is not in it, or ``timeout_s`` is
            not above 0.
    """
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be a time in seconds above 0, got {timeout_s!r}")
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ValueError(
                f"group must be None where torch.distributed is not initialised, got {group!r}"
            )
        return None
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group must be one that this process (rank {dist.get_rank()}) is a member of"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a torch.distributed.ProcessGroup or None, got {group!r}")
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) < 2:
        return None
    return Group(group.get_group_store(), dist.get_rank(group), ranks, group.group_name)


class _Turn:
    """The turn of one group, which one thread has at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_in_call = False
        """True while the thread that has the turn is in a call."""


_turns: dict[str, _Turn] = {}
"""Turns by the name of the group."""


@contextmanager
def turn_of(group: Group, timeout_s: float) -> Iterator[_Turn]:
    """Holds the turn of this process's calls in a group, for which other threads wait. Its thread
    may take it again.

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
    """Holds one call, in its turn (:func:`turn_of`).

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
