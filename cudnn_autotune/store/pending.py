"""What is to change in a store's file, reconciled with what the file holds by then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from cudnn_autotune.store import entry
from cudnn_autotune.store.content import Changes, Content
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.precedence import as_latest, prevailing


@dataclass(frozen=True)
class Pending:
    """A change, and those before it that could not be written."""

    unwritten: Changes
    given: Collection[Decision]
    gone: Mapping[bytes, Decision] = field(default_factory=dict)
    """Names of entries to drop: only where this decision stands there still."""
    are_latest: bool = False
    """Whether ``given`` were measured after all that the file holds by then."""

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
        waiting = _by_key(
            one
            for name, line in self.unwritten.items()
            if line is not None and name not in dropped and (one := decode(line)) is not None
        )
        given = _by_key(self.given)
        for key in dict.fromkeys([*waiting, *given]):
            lines = [content.line(name) for name in entry.names(key) if name not in dropped]
            known = [d for line in lines if line is not None and (d := decode(line)) is not None]
            earlier = [*known, *waiting.get(key, ())]
            new = given.get(key, [])
            if self.are_latest:
                new = [as_latest(decision, earlier) for decision in new]
            kept = prevailing([*earlier, *new])
            for decision in known:
                if decision not in kept:
                    changes[entry.name_of(decision)] = None
            for decision in kept:
                if decision not in known:
                    changes[entry.name_of(decision)] = entry.encode(decision, environment)
                    taken += any(decision is one for one in new)
        return changes, taken


def _by_key(decisions: Iterable[Decision]) -> dict[str, list[Decision]]:
    by_key: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_key.setdefault(decision.key, []).append(decision)
    return by_key
