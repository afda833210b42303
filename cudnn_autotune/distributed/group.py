"""The ranks of a process group, and the store that they share."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Group:
    """A process group of two or more, as one of its ranks sees it."""

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
        """Prefix of this package's keys in the store. It depends on the ranks, because a group that
        is created again under the same name with other ranks may use the same store."""
        ranks = hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]
        return f"cudnn_autotune/{ranks}"


def group_of(group: dist.ProcessGroup | None, timeout_s: float) -> Group | None:
    """The ranks of ``group`` (None: the default group); None where this process is alone.

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
