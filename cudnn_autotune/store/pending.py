"""What is to change in a store's file, reconciled with what the file holds by then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from cudnn_autotune.store import entry
from cudnn_autotune.store.content import Changes, Content
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.precedence import prevailing


@dataclass(frozen=True)
class Pending:
    """A change, and those before it that could not be written."""

    unwritten: Changes
    given: Collection[Decision]
    gone: Mapping[bytes, Decision] = field(default_factory=dict)
    """Names of entries to drop: only where this decision stands there still."""

    def settled(
        self,
        content: Content,
        environment: Environment,
        decode: Callable[[bytes], Decision | None],
    ) -> tuple[dict[bytes, bytes | None], int]:
        """The changes to make in ``content``, and how many of ``given`` they bring in, and of
        ``gone`` take out.

        Args:
            decode: an entry's decision; None where it is not to be served.
        """
        dropped = {name for name, line in self.unwritten.items() if line is None}
        going = set()
        for name, decision in self.gone.items():
            line = self.unwritten[name] if name in self.unwritten else content.line(name)
            if line is not None and decode(line) == decision:
                going.add(name)
        dropped |= going
        changes: dict[bytes, bytes | None] = {
            name: None for name in dropped if content.line(name) is not None
        }
        taken = len(going)
        new = {id(decision) for decision in self.given}
        for key, decisions in self._by_key(dropped, decode).items():
            lines = [content.line(name) for name in entry.names(key) if name not in dropped]
            known = [d for line in lines if line is not None and (d := decode(line)) is not None]
            kept = prevailing([*known, *decisions])
            for decision in known:
                if decision not in kept:
                    changes[entry.name_of(decision)] = None
            for decision in kept:
                if decision not in known:
                    changes[entry.name_of(decision)] = entry.encode(decision, environment)
                    taken += id(decision) in new
        return changes, taken

    def _by_key(
        self, dropped: Collection[bytes], decode: Callable[[bytes], Decision | None]
    ) -> dict[str, list[Decision]]:
        waiting = [
            decode(line)
            for name, line in self.unwritten.items()
            if line is not None and name not in dropped
        ]
        by_key: dict[str, list[Decision]] = {}
        for decision in [*waiting, *self.given]:
            if decision is not None:
                by_key.setdefault(decision.key, []).append(decision)
        return by_key
