"""One call of a group, from a rank's view: messages between ranks, and one outcome for all.

It uses only the store of the process group, and no collective. So no tensor is moved, no GPU waits,
and a dead rank does not block the others. Messages are JSON, never pickles.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from cudnn_autotune.core import versions
from cudnn_autotune.distributed.group import Group
from cudnn_autotune.distributed.heartbeat import OUTCOME, SILENT_S, Heartbeat, beat_name
from cudnn_autotune.distributed.mailbox import Mailbox, StoreThread
from cudnn_autotune.distributed.outcome import AGREED, DistributedTuningError, Outcome
from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

_T = TypeVar("_T")

LATEST = "latest"
"""The key with the name of the latest call; no other key stays between calls."""
REPLACED = "the process has ended, and another has come in its place"
FIRST_POLL_S = 0.002
LONGEST_POLL_S = 0.1
# After a failure rank 0, which often hosts the store, stays this long, so that others see the
# outcome.
_FAREWELL_S = 2.0
_CAME, _READY, _LEFT, _TURNS = "came", "ready", "left", "turns"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Hello:
    """The first message of a rank, which describes it."""

    terms: dict[str, Any]
    environment: str
    """Environment of the rank, as JSON text."""

    @classmethod
    def read(cls, tree: Any) -> _Hello:
        return cls(dict(tree["terms"]), json.dumps(tree["environment"]))


class Exchange:
    """A call from the view of one of its ranks (see ``rendezvous.exchange_with``).

    Its keys in the store begin with its unique name. Every method raises DistributedTuningError if
    the call has failed.
    """

    def __init__(self, group: Group, store: StoreThread, name: str, timeout_s: float) -> None:
        self.group = group
        self.name = name
        self.lobby = Mailbox(store, group.prefix)
        self.mailbox = Mailbox(store, f"{group.prefix}/{name}")
        self.heartbeat = Heartbeat(self.mailbox, group, timeout_s)
        self._written: list[str] = []
        self._environment: Environment
        """Set by :meth:`handshake`."""

    def enter(self, own: str) -> bool:
        """Takes this rank's place in the call, by writing a text that is unique to the process.

        Returns:
            False if the call has ended. If the place is taken, its process is gone, so the call is
            ended here.
        """
        if self.mailbox.peek(OUTCOME) is not None:
            return False
        if self.mailbox.put_first(place_name(self.group.rank), own) != own:
            replaced = Outcome(self.group.global_rank, REPLACED)
            self.mailbox.put_first(OUTCOME, replaced.to_text())
            return False
        self.mailbox.add(_CAME)
        self.heartbeat.start()
        return True

    def put(self, name: str, tree: Any) -> None:
        """Sends plain JSON to the other ranks; each name may be used once in a call."""
        self._written.append(name)
        self.mailbox.put(name, json.dumps(tree, allow_nan=False))

    def get(self, name: str, sender: int | None = None) -> Any:
        """Waits for the message of this name. Fails, naming ``sender`` (a place in the group), if
        it is not JSON."""
        self.heartbeat.note("")
        text = self._wait(lambda: self.mailbox.peek(name))
        return self.read(sender, f"the message {name}", lambda: json.loads(text))

    def put_decision(self, name: str, decision: Decision) -> None:
        """Sends a decision as a line of a store's file. Raises ValueError if no rank could read it,
        such as invalid evidence of a user's strategy."""
        line = codec.encode(decision, self._environment)
        self._decoded(line)
        self.put(name, [self.group.rank, line.decode()])

    def get_decision(self, name: str, is_asked_for: Callable[[Decision], bool]) -> Decision:
        """Waits for the decision of this name. Fails, naming its sender, if it cannot be read or is
        not the requested one."""
        message = self.get(name)
        sender = message[0] if isinstance(message, list) and message else None
        if not isinstance(sender, int) or not 0 <= sender < self.group.size:
            self.fail(None, f"the message {name} does not tell its sender: {str(message)[:200]}")
        decision = self.read(sender, "its decision", lambda: self._decoded(message[1].encode()))
        if not is_asked_for(decision):
            self.fail(sender, f"its decision is on {decision.key}, for which nobody asked it")
        return decision

    def _decoded(self, line: bytes) -> Decision:
        if codec.name_in(line, codec.seed(self._environment)) is None:
            raise ValueError(f"it is damaged, or of another environment: {line[:200]!r}")
        return codec.decode(line, self._environment)

    def read(self, sender: int | None, what: str, how: Callable[[], _T]) -> _T:
        """Returns the result of ``how``, which reads a message of ``sender`` (a place in the
        group); fails, naming that rank, if it raises."""
        try:
            return how()
        except Exception as error:  # the message may have any content
            self.fail(sender, f"{what} cannot be read: {type(error).__name__}: {error}")

    def combine(
        self,
        name: str,
        tree: Any,
        of: Sequence[int],
        how: Callable[[dict[int, _T]], Any],
        read: Callable[[Any], _T],
    ) -> Any:
        """Combines the messages of these ranks (places in the group) by ``how``. The first of them
        computes the result and sends it to the others.

        Args:
            read: called first on each message; the call fails, naming the sender, if it raises.
        """
        self.put(f"{name}/{self.group.rank}", tree)
        combined = f"{name} of all/{of[0]}"
        if self.group.rank == of[0]:
            sent = {rank: self.get(f"{name}/{rank}", rank) for rank in of}
            what = f"its message {name!r}"
            parts = {r: self.read(r, what, partial(read, sent[r])) for r in of}
            self.put(combined, how(parts))
        return self.get(combined, of[0])

    def handshake(self, environment: Environment, terms: Mapping[str, Any]) -> tuple[int, ...]:
        """Waits for all ranks, and fails unless their versions of this package and their terms
        (plain JSON) are equal.

        Returns:
            The ranks (places in the group, ascending) of this environment, this one included. They
            can use each other's measurements.
        """

        def sort(hellos: dict[int, _Hello]) -> list[list[int]]:
            equals: dict[str, list[int]] = {}
            for rank, hello in hellos.items():
                self.compare(hellos[0].terms, hello.terms, 0, rank)
                equals.setdefault(hello.environment, []).append(rank)
            return list(equals.values())

        self._environment = environment
        own = {"the version of cudnn_autotune": versions.version()}  # it is compared first
        hello = {"environment": environment.to_json(), "terms": {**own, **terms}}
        subgroups = self.combine("hello", hello, range(self.group.size), sort, _Hello.read)
        return self.read(
            0,
            "its list of equal ranks",
            lambda: next(tuple(ranks) for ranks in subgroups if self.group.rank in ranks),
        )

    def compare(
        self, wanted: Mapping[str, Any], given: Mapping[str, Any], first: int, rank: int
    ) -> None:
        """Fails, naming ``rank``, if its ``given`` differs from ``wanted`` of ``first``."""
        for name in {**wanted, **given}:
            if wanted.get(name) != given.get(name):
                self.fail(
                    rank,
                    f"{name} must be {wanted.get(name)!r}, as on rank {self.group.ranks[first]}, "
                    f"and is {given.get(name)!r}",
                )

    def turn(self, first: int) -> int:
        """Returns the next of the numbers 0, 1, 2 ..., which one rank each gets; ``first`` is the
        lowest of these ranks."""
        self._raise_if_failed()
        return self.mailbox.add(f"{_TURNS}/{first}") - 1

    def note(self, step: str) -> None:
        """Records this rank's next step, for which it has the call's timeout."""
        self._raise_if_failed()
        self.heartbeat.note(step)

    def fail(self, rank: int | None, reason: str) -> NoReturn:
        """Ends the call on all ranks; ``rank`` (a place in the group) is to blame."""
        at_fault = None if rank is None else self.group.ranks[rank]
        outcome = self.heartbeat.propose(Outcome(at_fault, reason))
        raise DistributedTuningError(outcome.rank, outcome.reason or reason)

    def agree(self) -> None:
        """Returns once every rank has called it, on all ranks or on none."""
        self.heartbeat.note("")
        if self.mailbox.add(_READY) == self.group.size:
            self.heartbeat.propose(AGREED)
        self._wait(self.heartbeat.look)
        self._raise_if_failed()

    def leave(self, error: BaseException | None) -> Outcome | None:
        """Leaves the call, and ends it by ``error`` if it has not ended; returns the outcome.

        The rank removes its keys, and the last one removes the common keys.
        """
        outcome = self.heartbeat.outcome
        if error is not None and outcome is None:
            outcome = self.heartbeat.propose(self.outcome_of(error))
        self.heartbeat.stop()
        rank = self.group.rank
        try:
            for name in (*self._written, beat_name(rank), place_name(rank)):
                self.mailbox.remove(name)
            if outcome is not None:
                self.lobby.replace(LATEST, self.name, "")
            if rank == 0 and outcome is not None and outcome.reason != REPLACED:
                self._wait_for_others(outcome)
            came = self.mailbox.add(_CAME, 0)  # read before this rank counts as gone
            if self.mailbox.add(_LEFT) >= came:
                turns = (f"{_TURNS}/{first}" for first in range(self.group.size))
                for name in (_CAME, _READY, _LEFT, OUTCOME, *turns):
                    self.mailbox.remove(name)
        except DistributedTuningError as lost:
            _log.info("the keys of a call stay in the store: %s", lost.reason)
        return outcome

    def outcome_of(self, error: BaseException) -> Outcome:
        """Returns the outcome by which the other ranks report an exception of this rank."""
        if isinstance(error, DistributedTuningError):
            return Outcome(error.rank, error.reason)
        return Outcome(self.group.global_rank, f"{type(error).__name__}: {error}")

    def _wait_for_others(self, outcome: Outcome) -> None:
        others = self.mailbox.add(_CAME, 0) - 1
        if outcome.rank not in (None, self.group.ranks[0]):
            others -= 1  # the blamed rank may be dead
        until_s = time.monotonic() + (SILENT_S if outcome.is_agreed else _FAREWELL_S)
        while self.mailbox.add(_LEFT, 0) < others and time.monotonic() < until_s:
            time.sleep(0.01)

    def _wait(self, look: Callable[[], _T | None]) -> _T:
        poll_s = FIRST_POLL_S
        while (found := look()) is None:
            if self.heartbeat.ended.wait(poll_s):
                self._raise_if_failed()
            poll_s = min(LONGEST_POLL_S, poll_s * 1.5)
        return found

    def _raise_if_failed(self) -> None:
        outcome = self.heartbeat.outcome
        if outcome is not None and not outcome.is_agreed:
            raise DistributedTuningError(outcome.rank, outcome.reason)


def place_name(rank: int) -> str:
    return f"place/{rank}"
