"""A change to a store's file, reconciled with what the file holds by then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cudnn_autotune.store import entry
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.journal import Changes
from cudnn_autotune.store.precedence import as_latest, prevailing


class Taken(NamedTuple):
    """How many decisions a change has brought in, or taken out."""

    new: int = 0
    replaced: int = 0
    """Brought in, in the place of one of the same name."""
    removed: int = 0


@dataclass(frozen=True)
class Pending:
    """A change, and those before it that could not be written."""

    unwritten: Changes
    given: Collection[Decision]
    gone: Mapping[bytes, Decision]
    """Names of entries to drop: only where this decision stands there still."""
    are_latest: bool
    """Whether ``given`` were measured after all that the file holds by then."""

    def reconciled(
        self,
        entries: Mapping[bytes, bytes],
        encode: Callable[[Decision], bytes],
        decode: Callable[[bytes | None], Decision | None],
    ) -> tuple[Changes, Taken]:
        """The changes to make in ``entries`` (name -> line), and what they come to.

        Args:
            decode: a line's decision; None where it is not to be served.
        """
        going = {
            name
            for name, decision in self.gone.items()
            if decode(self.unwritten.get(name, entries.get(name))) == decision
        }
        dropped = going | {name for name, line in self.unwritten.items() if line is None}
        changes: dict[bytes, bytes | None] = {name: None for name in dropped if name in entries}
        new = replaced = 0
        waiting = _by_key(
            one
            for name, line in self.unwritten.items()
            if name not in dropped and (one := decode(line)) is not None
        )
        given = _by_key(self.given)
        for key in dict.fromkeys([*waiting, *given]):
            lines = [entries.get(name) for name in entry.names(key) if name not in dropped]
            known = [decision for line in lines if (decision := decode(line)) is not None]
            earlier = [*known, *waiting.get(key, ())]
            fresh = given.get(key, [])
            if self.are_latest:
                fresh = [as_latest(decision, earlier) for decision in fresh]
            kept = prevailing([*earlier, *fresh])
            for decision in known:
                if decision not in kept:
                    changes[entry.name_of(decision)] = None
            names = {entry.name_of(decision) for decision in earlier}
            for decision in kept:
                if decision not in known:
                    name = entry.name_of(decision)
                    changes[name] = encode(decision)
                    if any(decision is one for one in fresh):
                        new += name not in names
                        replaced += name in names
        return changes, Taken(new, replaced, len(going))


def _by_key(decisions: Iterable[Decision]) -> dict[str, list[Decision]]:
    by_key: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_key.setdefault(decision.key, []).append(decision)
    return by_key
