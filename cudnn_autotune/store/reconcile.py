"""Reconciling a change to a store with what its file holds by the time it can be written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from cudnn_autotune.store import entry
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.journal import Changes
from cudnn_autotune.store.precedence import as_latest, prevailing


class Taken(NamedTuple):
    """The numbers of decisions that a change added, replaced and removed."""

    new: int = 0
    replaced: int = 0
    """The number of decisions that took the place of one with the same entry name."""
    removed: int = 0


def reconciled(
    entries: Mapping[bytes, bytes],
    unwritten: Changes,
    given: Collection[Decision],
    gone: Mapping[bytes, Decision],
    environment: Environment,
    decode: Callable[[bytes | None], Decision | None],
    *,
    are_latest: bool,
) -> tuple[Changes, Taken]:
    """Returns the changes to make to a file, and what they add, replace and remove.

    Args:
        entries: What the file holds, name to line.
        unwritten: Changes of earlier calls that are not in the file yet.
        given: Decisions to add where they prevail.
        gone: Name to decision: the entry is removed if it still holds this decision.
        decode: Returns the decision of a line, or None if there is none that can be served.
        are_latest: Whether ``given`` were measured after everything that the file holds.
    """
    going = {
        name
        for name, decision in gone.items()
        if decode(unwritten.get(name, entries.get(name))) == decision
    }
    dropped = going | {name for name, line in unwritten.items() if line is None}
    changes: dict[bytes, bytes | None] = {name: None for name in dropped if name in entries}
    new = replaced = 0
    waiting = _by_key(
        one
        for name, line in unwritten.items()
        if name not in dropped and (one := decode(line)) is not None
    )
    adding = _by_key(given)
    for key in dict.fromkeys([*waiting, *adding]):
        lines = [entries.get(name) for name in entry.names(key) if name not in dropped]
        known = [decision for line in lines if (decision := decode(line)) is not None]
        earlier = [*known, *waiting.get(key, ())]
        fresh = adding.get(key, [])
        if are_latest:
            fresh = [as_latest(decision, earlier) for decision in fresh]
        kept = prevailing([*earlier, *fresh])
        for decision in known:
            if decision not in kept:
                changes[entry.name_of(decision)] = None
        names = {entry.name_of(decision) for decision in earlier}
        for decision in kept:
            if decision not in known:
                name = entry.name_of(decision)
                changes[name] = entry.encode(decision, environment)
                if any(decision is one for one in fresh):
                    new += name not in names
                    replaced += name in names
    return changes, Taken(new, replaced, len(going))


def _by_key(decisions: Iterable[Decision]) -> dict[str, list[Decision]]:
    by_key: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_key.setdefault(decision.key, []).append(decision)
    return by_key
