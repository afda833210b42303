"""One call of a group, as a rank that has joined it sees it: its part of the store."""

from __future__ import annotations

import logging
import time

from cudnn_autotune.distributed.ending import Ending
from cudnn_autotune.distributed.errors import DistributedTuningError
from cudnn_autotune.distributed.mailbox import Mailbox
from cudnn_autotune.distributed.members import Members
from cudnn_autotune.distributed.pulse import ENDING, SILENT_S, Pulse, beat_name
from cudnn_autotune.distributed.store_thread import StoreThread

LATEST = "latest"
"""Names the call that the ranks of the group join; the one key that is there between calls."""
# Rank 0 often hosts the store. After a failure, for so long it lets others learn of it.
_FAREWELL_S = 2.0
REPLACED = "the process has ended, and another has come in its place"
_CAME, _READY, _LEFT, _ALL_HERE = "came", "ready", "left", "all here"

_log = logging.getLogger(__name__)


class Call:
    """Its keys begin with its name, which no other call has."""

    def __init__(self, members: Members, store: StoreThread, name: str, timeout_s: float) -> None:
        self.members = members
        self.name = name
        self.lobby = Mailbox(store, members.prefix)
        self.mailbox = Mailbox(store, f"{members.prefix}/{name}")
        self.pulse = Pulse(self.mailbox, members.rank, members.ranks, timeout_s)
        self._written: list[str] = []

    def join(self, own: str) -> bool:
        """Takes this rank's place in the call, under a text that nobody else has; False where that
        cannot be: the call has ended, or does so now, since the place was that of a process which
        is no more."""
        if self.mailbox.peek(ENDING) is not None:
            return False
        if self.mailbox.put_first(place_name(self.members.rank), own) != own:
            replaced = Ending(self.members.ranks[self.members.rank], REPLACED)
            self.mailbox.put_first(ENDING, replaced.to_text())
            return False
        self.mailbox.add(_CAME)
        self.pulse.start()
        return True

    def put(self, name: str, text: str) -> None:
        """For the others to read, until this rank leaves."""
        self._written.append(name)
        self.mailbox.put_long(name, text)

    def welcome(self) -> None:
        """Tells that all have come; what the first rank does."""
        self.mailbox.put(_ALL_HERE, "")

    def is_complete(self) -> bool:
        """Whether all have come, and none of them in an earlier run."""
        return self.mailbox.peek(_ALL_HERE) is not None

    def vote(self) -> bool:
        """Whether all have voted now."""
        return self.mailbox.add(_READY) == self.members.size

    def leave(self, error: BaseException | None) -> Ending | None:
        """Ends the call by ``error``, where it has not ended; returns how it has.

        This rank takes its keys along, the last one those that belong to all.
        """
        ending = self.pulse.ending
        if error is not None and ending is None:
            ending = self.pulse.propose(self.told(error))
        self.pulse.stop()
        try:
            for name in self._written:
                self.mailbox.remove_long(name)
            for own in (beat_name, place_name):
                self.mailbox.remove(own(self.members.rank))
            if ending is not None:
                self.lobby.replace(LATEST, self.name, "")
            if self.members.rank == 0 and ending is not None and ending.reason != REPLACED:
                self._see_others_off(ending)
            came = self.mailbox.add(_CAME, 0)  # before another one can be the last
            if self.mailbox.add(_LEFT) >= came:
                turns = map(turns_name, range(self.members.size))
                for name in (_CAME, _READY, _LEFT, _ALL_HERE, ENDING, *turns):
                    self.mailbox.remove(name)
        except DistributedTuningError as lost:
            # How the call has ended is settled.
            _log.info("nothing was cleaned up: %s", lost.reason)
        return ending

    def told(self, error: BaseException) -> Ending:
        """An exception on this rank, as the others get to know it."""
        if isinstance(error, DistributedTuningError):
            return Ending(error.rank, error.reason)
        own = self.members.ranks[self.members.rank]
        return Ending(own, f"{type(error).__name__}: {error}")

    def _see_others_off(self, ending: Ending) -> None:
        others = self.mailbox.add(_CAME, 0) - 1
        if ending.rank not in (None, self.members.ranks[0]):
            others -= 1  # it may be dead
        until_s = time.monotonic() + (SILENT_S if ending.is_agreed else _FAREWELL_S)
        while self.mailbox.add(_LEFT, 0) < others and time.monotonic() < until_s:
            time.sleep(0.01)


def place_name(rank: int) -> str:
    return f"place/{rank}"


def turns_name(first: int) -> str:
    return f"turns/{first}"
