"""What the ranks of a group tell each other in one call, and how all of them end it alike.

Nothing but the store that the group was set up with is used: no collective, so that no tensor
moves, no GPU waits, and a rank that dies leaves nobody hanging. Messages are JSON, never pickles.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

from cudnn_autotune.distributed.ending import AGREED, Ending
from cudnn_autotune.distributed.errors import DistributedTuningError
from cudnn_autotune.distributed.members import Members
from cudnn_autotune.distributed.pulse import ENDING, SILENT_S, Pulse, beat_name

_T = TypeVar("_T")

_FIRST_POLL_S = 0.002
_LONGEST_POLL_S = 0.1
# Rank 0 often hosts the store. After a failure, for so long it lets others learn of it.
_FAREWELL_S = 2.0
_READY, _LEFT = "ready", "left"

_log = logging.getLogger(__name__)


class Exchange:
    """One call, as one rank sees it: a context that all ranks of the group enter.

    An exception within it ends the call on all ranks: each raises a DistributedTuningError, the
    same one. So does a rank that dies (seen after some seconds), and one that does not get on with
    what it does for ``timeout_s``. Every method raises it where the call has failed.
    """

    def __init__(self, members: Members, timeout_s: float) -> None:
        self.members = members
        self._timeout_s = timeout_s
        self._mailbox = members.new_mailbox()
        self._pulse = Pulse(self._mailbox, members.rank, members.ranks, timeout_s)
        self._written: list[str] = []

    def __enter__(self) -> Self:
        self._pulse.start()
        return self

    def put(self, name: str, tree: Any) -> None:
        """Tells the others something, as plain JSON; once in a call under each name."""
        name = f"{name}/{self.members.rank}"
        self._written.append(name)
        self._mailbox.put_long(name, json.dumps(tree, allow_nan=False))

    def gather(self, name: str, of: Sequence[int]) -> dict[int, Any]:
        """What each of these ranks (places in the group) has put there, or will put."""
        return {rank: json.loads(self._take(f"{name}/{rank}", rank)) for rank in of}

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
        return self._mailbox.add(_turns(first)) - 1

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
        if self._mailbox.add(_READY) == self.members.size:
            self._pulse.propose(AGREED)
        self._wait(self._pulse.look)
        self._raise_if_failed()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ending = self._pulse.ending
        if error is not None and ending is None:
            ending = self._pulse.propose(self._told(error))
        self._leave(ending)
        if ending is None or ending.is_agreed or not isinstance(error, Exception):
            return
        if self._told(error) != ending or not isinstance(error, DistributedTuningError):
            raise DistributedTuningError(ending.rank, ending.reason) from error

    def _told(self, error: BaseException) -> Ending:
        if isinstance(error, DistributedTuningError):
            return Ending(error.rank, error.reason)
        return Ending(self._global(self.members.rank), f"{type(error).__name__}: {error}")

    def _take(self, name: str, rank: int) -> str:
        deadline_s = time.monotonic() + self._timeout_s

        def look() -> str | None:
            text = self._mailbox.peek_long(name)
            # Who has come is watched by its neighbour, who has not can only be waited for.
            is_late = text is None and time.monotonic() > deadline_s
            if is_late and self._mailbox.peek(beat_name(rank)) is None:
                self.fail(rank, f"timeout: it has not come within {self._timeout_s:g} s")
            return text

        self._pulse.note("")
        return self._wait(look)

    def _wait(self, look: Callable[[], _T | None]) -> _T:
        poll_s = _FIRST_POLL_S
        while True:
            found = look()
            if found is not None:
                return found
            if self._pulse.ended.wait(poll_s):
                self._raise_if_failed()
            poll_s = min(_LONGEST_POLL_S, poll_s * 1.5)

    def _raise_if_failed(self) -> None:
        ending = self._pulse.ending
        if ending is not None and not ending.is_agreed:
            raise DistributedTuningError(ending.rank, ending.reason)

    def _global(self, rank: int | None) -> int | None:
        return None if rank is None else self.members.ranks[rank]

    def _leave(self, ending: Ending | None) -> None:
        """Takes this rank's keys along; the last one takes those that belong to all.

        Where somebody has died those stay: who comes late must learn how the call has ended.
        """
        self._pulse.stop()
        try:
            for name in self._written:
                self._mailbox.remove_long(name)
            self._mailbox.remove(beat_name(self.members.rank))
            if self.members.rank == 0:
                self._see_others_off(ending)
            if self._mailbox.add(_LEFT) == self.members.size:
                turns = map(_turns, range(self.members.size))
                for name in (_READY, _LEFT, ENDING, *turns):
                    self._mailbox.remove(name)
        except DistributedTuningError as error:
            # How the call has ended is settled.
            _log.info("nothing was cleaned up: %s", error.reason)

    def _see_others_off(self, ending: Ending | None) -> None:
        is_agreed = ending is not None and ending.is_agreed
        others = self.members.size - 1
        if ending is not None and ending.rank not in (None, self.members.ranks[0]):
            others -= 1  # it may be dead
        until_s = time.monotonic() + (SILENT_S if is_agreed else _FAREWELL_S)
        while self._mailbox.add(_LEFT, 0) < others and time.monotonic() < until_s:
            time.sleep(0.01)


def _turns(first: int) -> str:
    return f"turns/{first}"
