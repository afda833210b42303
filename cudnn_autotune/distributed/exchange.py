"""What the ranks of a group tell each other in one call, and how all of them end it alike.

Nothing but the store that the group was set up with is used: no collective, so that no tensor
moves, no GPU waits, and a rank that dies leaves nobody hanging. Messages are JSON, never pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from cudnn_autotune.distributed.call import Call, turns_name
from cudnn_autotune.distributed.ending import AGREED, Ending
from cudnn_autotune.distributed.errors import DistributedTuningError
from cudnn_autotune.distributed.members import Members
from cudnn_autotune.distributed.pulse import PATIENCE_S
from cudnn_autotune.distributed.rendezvous import FIRST_POLL_S, LONGEST_POLL_S, join
from cudnn_autotune.distributed.store_thread import StoreThread

_T = TypeVar("_T")


class Exchange:
    """One call, as one rank sees it: a context that all ranks of the group enter.

    It begins once all have come. An exception within it ends the call on all ranks: each raises a
    DistributedTuningError, the same one. So does a rank that dies (seen after some seconds), and
    one that does not get on with what it does for ``timeout_s``. Every method raises it where the
    call has failed.
    """

    _call: Call

    def __init__(self, members: Members, timeout_s: float) -> None:
        self.members = members
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        self._store = StoreThread(self.members.store, PATIENCE_S)
        try:
            self._call = join(self.members, self._store, self._timeout_s)
        except BaseException:
            self._store.stop()
            raise
        self._pulse, self._mailbox = self._call.pulse, self._call.mailbox
        self._pulse.note("its first steps")
        return self

    def put(self, name: str, tree: Any) -> None:
        """Tells the others something, as plain JSON; once in a call under each name."""
        self._call.put(f"{name}/{self.members.rank}", json.dumps(tree, allow_nan=False))

    def gather(self, name: str, of: Sequence[int]) -> dict[int, Any]:
        """What each of these ranks (places in the group) has put there, or will put."""
        return {rank: json.loads(self._take(f"{name}/{rank}")) for rank in of}

    def combine(
        self, name: str, tree: Any, of: Sequence[int], how: Callable[[dict[int, Any]], Any]
    ) -> Any:
        """What the first of these ranks makes of what each of them tells; the same for all.

        Every one of them reads one text, and the first all: with N ranks, 2 N go through the store.
        """
        self.put(name, tree)
        first, combined = of[0], f"{name} of all"
        if self.members.rank == first:
            self.put(combined, how(self.gather(name, of)))
        return self.gather(combined, [first])[first]

    def turn(self, first: int) -> int:
        """0, 1, 2 ...: each number once in the sub-group whose lowest rank is ``first``."""
        self.check()
        return self._mailbox.add(turns_name(first)) - 1

    def note(self, doing: str) -> None:
        """Says what this rank does next; that may take ``timeout_s``."""
        self.check()
        self._pulse.note(doing)

    def check(self) -> None:
        """Raises DistributedTuningError where the call has failed."""
        if self._pulse.ended.is_set():
            self._raise_if_failed()

    def fail(self, rank: int | None, reason: str) -> NoReturn:
        """Ends the call on all ranks. ``rank`` (a place in the group) is to blame."""
        ending = self._pulse.propose(Ending(self._global(rank), reason))
        raise DistributedTuningError(ending.rank, ending.reason or reason)

    def agree(self) -> None:
        """Returns once every rank has called it, and on all ranks or on none."""
        self._pulse.note("")
        if self._call.vote():
            self._pulse.propose(AGREED)
        self._wait(self._pulse.look)
        self._raise_if_failed()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ending = self._call.leave(error)
        self._store.stop()
        if ending is None or ending.is_agreed or not isinstance(error, Exception):
            return
        if self._call.told(error) != ending or not isinstance(error, DistributedTuningError):
            raise DistributedTuningError(ending.rank, ending.reason) from error

    def _take(self, name: str) -> str:
        self._pulse.note("")
        return self._wait(lambda: self._mailbox.peek_long(name))

    def _wait(self, look: Callable[[], _T | None]) -> _T:
        poll_s = FIRST_POLL_S
        while True:
            found = look()
            if found is not None:
                return found
            if self._pulse.ended.wait(poll_s):
                self._raise_if_failed()
            poll_s = min(LONGEST_POLL_S, poll_s * 1.5)

    def _raise_if_failed(self) -> None:
        ending = self._pulse.ending
        if ending is not None and not ending.is_agreed:
            raise DistributedTuningError(ending.rank, ending.reason)

    def _global(self, rank: int | None) -> int | None:
        return None if rank is None else self.members.ranks[rank]
