"""The rendezvous: ranks of a group join one call, despite earlier calls' keys in the store.

A store outlives processes: torchrun restarts them on the same port, and all keys are still there.
If a rank failed before a call, ranks have made different numbers of calls. So a call has a random
name, which is in the store. No message in it is valid before all ranks are known to be present at
the same time:

1. A rank takes its place in the latest call, or in a new one if that has ended. If its place is
   taken, that process is gone: the rank ends that call and begins another. No process takes the
   same place twice.
2. Once the first rank has taken its place, the others answer. An answer is therefore no older than
   the first rank's process.
3. Once all have answered, the first rank welcomes them. So a rank that reads the welcome knows that
   the first rank joined after it.

Until it is welcomed, a rank moves on to a newer call if there is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex

from cudnn_autotune.distributed.exchange import (
    FIRST_POLL_S,
    LATEST,
    LONGEST_POLL_S,
    REPLACED,
    Exchange,
    place_name,
)
from cudnn_autotune.distributed.group import Group, call_of
from cudnn_autotune.distributed.heartbeat import PATIENCE_S
from cudnn_autotune.distributed.mailbox import Mailbox, StoreThread
from cudnn_autotune.distributed.outcome import DistributedTuningError, Outcome

_WELCOME = "welcome"


@contextmanager
def exchange_with(group: Group, timeout_s: float) -> Iterator[Exchange]:
    """Holds a call of all ranks of the group; it begins once all have joined. It waits for calls of
    this process's other threads in the group.

    An exception within it ends the call on all ranks: each raises the same DistributedTuningError.
    So does a rank's death, or no progress for ``timeout_s`` seconds.
    """
    with call_of(group, timeout_s), _store_thread(group) as store:
        exchange = _join(group, store, timeout_s)
        try:
            exchange.note("its first steps")
            yield exchange
        except BaseException as error:
            outcome = exchange.leave(error)
            has_failed = outcome is not None and not outcome.is_agreed
            is_told = isinstance(error, DistributedTuningError) and (
                exchange.outcome_of(error) == outcome
            )
            if outcome is not None and has_failed and not is_told and isinstance(error, Exception):
                raise DistributedTuningError(outcome.rank, outcome.reason) from error
            raise
        exchange.leave(None)


@contextmanager
def _store_thread(group: Group) -> Iterator[StoreThread]:
    store = StoreThread(group.store, PATIENCE_S)
    try:
        yield store
    finally:
        store.stop()


def _join(group: Group, store: StoreThread, timeout_s: float) -> Exchange:
    """Joins and returns a call that all ranks of the group have joined within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        exchange = _latest_or_new(group, store, timeout_s)
        try:
            is_complete = _wait_for_all(exchange, timeout_s, deadline_s)
        except BaseException as error:
            exchange.leave(error)
            raise
        if is_complete:
            exchange.heartbeat.see_all_here()
            return exchange
        exchange.leave(None)


def _latest_or_new(group: Group, store: StoreThread, timeout_s: float) -> Exchange:
    lobby = Mailbox(store, group.prefix)
    while True:
        latest = lobby.peek(LATEST)
        if latest:
            exchange = Exchange(group, store, latest, timeout_s)
            if exchange.enter(token_hex(8)):
                return exchange
        lobby.replace(LATEST, latest, token_hex(8))


def _wait_for_all(exchange: Exchange, timeout_s: float, deadline_s: float) -> bool:
    """Waits until all ranks have joined; returns False if a newer call has replaced this one."""
    group, mailbox = exchange.group, exchange.mailbox
    missing = list(range(1, group.size))
    has_answered = False
    poll_s = FIRST_POLL_S
    while True:
        if group.rank == 0:
            while missing and mailbox.peek(_answer_name(missing[0])) is not None:
                missing.pop(0)
            if not missing and not has_answered:
                exchange.put(_WELCOME, "")
                has_answered = True
        elif not has_answered and mailbox.peek(place_name(0)) is not None:
            exchange.put(_answer_name(group.rank), "")
            has_answered = True
        if mailbox.peek(_WELCOME) is not None:
            return True
        is_latest = exchange.lobby.peek(LATEST) == exchange.name
        outcome = exchange.heartbeat.look()
        if outcome is not None and outcome.reason != REPLACED:
            raise DistributedTuningError(outcome.rank, outcome.reason)
        if outcome is not None or not is_latest:
            return False
        if time.monotonic() > deadline_s:
            late = group.ranks[_first_missing(exchange)]
            reason = f"timeout: it has not come within {timeout_s:g} s"
            exchange.heartbeat.propose(Outcome(late, reason))
        exchange.heartbeat.ended.wait(poll_s)
        poll_s = min(LONGEST_POLL_S, poll_s * 1.5)


def _first_missing(exchange: Exchange) -> int:
    if exchange.mailbox.peek(place_name(0)) is None:
        return 0
    others = range(1, exchange.group.size)
    # If all others have answered, the first rank is dead.
    return next((r for r in others if exchange.mailbox.peek(_answer_name(r)) is None), 0)


def _answer_name(rank: int) -> str:
    return f"here/{rank}"
