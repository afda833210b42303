"""How the ranks of a group meet in one call, whatever earlier ones have left in the store.

A store outlives processes: torchrun starts them anew on the same port, and all keys are as they
were. Nor have all ranks made equally many calls, where one has failed before it came to its call.
So a call has a random name, which the store tells; and nothing counts as said in it before all
ranks are known to be there at once:

1. A rank takes its place in the latest call, or in a new one where that has ended. If its place is
   taken, then by a process that is no more: it ends that call and begins another. No process takes
   the same place twice.
2. Once the first rank has taken its place, the others answer it. An answer is therefore no older
   than the first rank's process.
3. Once all have answered, the first rank welcomes them. Who reads that has found a first rank that
   was there after itself.

Until it is welcomed a rank follows to a newer call.
"""

from __future__ import annotations

import time
from secrets import token_hex

from cudnn_autotune.distributed.call import LATEST, REPLACED, Call, place_name
from cudnn_autotune.distributed.ending import Ending
from cudnn_autotune.distributed.errors import DistributedTuningError
from cudnn_autotune.distributed.mailbox import Mailbox
from cudnn_autotune.distributed.members import Members
from cudnn_autotune.distributed.store_thread import StoreThread

FIRST_POLL_S = 0.002
LONGEST_POLL_S = 0.1


def join(members: Members, store: StoreThread, timeout_s: float) -> Call:
    """A call in which all ranks of the group are.

    Raises:
        DistributedTuningError: one has not come within ``timeout_s``, or has died meanwhile.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        call = _latest_or_new(members, store, timeout_s)
        try:
            is_complete = _wait_for_all(call, timeout_s, deadline_s)
        except BaseException as error:
            call.leave(error)
            raise
        if is_complete:
            call.pulse.see_all_here()
            return call
        call.leave(None)


def _latest_or_new(members: Members, store: StoreThread, timeout_s: float) -> Call:
    lobby = Mailbox(store, members.prefix)
    while True:
        latest = lobby.peek(LATEST)
        if latest:
            call = Call(members, store, latest, timeout_s)
            if call.join(token_hex(8)):
                return call
        lobby.replace(LATEST, latest, token_hex(8))


def _wait_for_all(call: Call, timeout_s: float, deadline_s: float) -> bool:
    """False where the call has made way for a newer one."""
    rank, others = call.members.rank, list(range(1, call.members.size))
    has_answered = rank == 0
    poll_s = FIRST_POLL_S
    while True:
        if not has_answered and call.mailbox.peek(place_name(0)) is not None:
            call.put(_answer_name(rank), "")
            has_answered = True
        if rank == 0:
            while others and call.mailbox.peek(_answer_name(others[0])) is not None:
                others.pop(0)
            if not others:
                call.welcome()
        if call.is_complete():
            return True
        is_latest = call.lobby.peek(LATEST) == call.name
        ending = call.pulse.look()
        if ending is not None and ending.reason != REPLACED:
            raise DistributedTuningError(ending.rank, ending.reason)
        if ending is not None or not is_latest:
            return False
        if time.monotonic() > deadline_s:
            late = call.members.ranks[_first_missing(call)]
            call.pulse.propose(Ending(late, f"timeout: it has not come within {timeout_s:g} s"))
        call.pulse.ended.wait(poll_s)
        poll_s = min(LONGEST_POLL_S, poll_s * 1.5)


def _first_missing(call: Call) -> int:
    if call.mailbox.peek(place_name(0)) is None:
        return 0
    others = range(1, call.members.size)
    answers = (call.mailbox.peek_long(_answer_name(rank)) for rank in others)
    # If all have answered, then a first rank that is no more.
    return next((r for r, answer in zip(others, answers, strict=True) if answer is None), 0)


def _answer_name(rank: int) -> str:
    return f"here/{rank}"
