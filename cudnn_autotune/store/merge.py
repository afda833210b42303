"""Merges of decisions: the decisions that stay for one key, and the changes of a store's file as it
is when it can be written.

The result does not depend on the order in which the decisions arrive. These are compared in turn:

1. The workspace limit of the measurement: the larger one prevails, because its decision also
   answers questions with a tighter limit.
2. The time budget: a decision that no budget cut short prevails, else the one with the larger
   budget.
3. The time of the measurement: the later one prevails. A decision that replaced another one counts
   as later than it, even if a clock was set back.

At most two decisions remain: one measured without determinism, and one with it, if that had a
larger workspace limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision, admits, utc_text
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.journal import Changes


class Taken(NamedTuple):
    """The numbers of decisions that a change added, replaced and removed."""

    new: int = 0
    """The number of decisions under an entry name that had none."""
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
    """Returns the changes of a file, and the numbers of added, replaced and removed decisions.

    Args:
        entries: The file's entries, name to line.
        unwritten: Changes of earlier calls that are not in the file yet.
        given: Decisions to add if they prevail.
        gone: Name to decision: the entry is removed if it still has this decision.
        decode: Returns the decision of a line, or None if it cannot serve.
        are_latest: Whether ``given`` were measured after all decisions of the file.
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
        lines = [entries.get(name) for name in codec.names(key) if name not in dropped]
        known = [decision for line in lines if (decision := decode(line)) is not None]
        earlier = [*known, *waiting.get(key, ())]
        fresh = adding.get(key, [])
        if are_latest:
            fresh = [as_latest(decision, earlier) for decision in fresh]
        kept = prevailing([*earlier, *fresh])
        for decision in known:
            if decision not in kept:
                changes[codec.name_of(decision)] = None
        names = {codec.name_of(decision) for decision in earlier}
        for decision in kept:
            if decision not in known:
                name = codec.name_of(decision)
                changes[name] = codec.encode(decision, environment)
                if any(decision is one for one in fresh):
                    new += name not in names
                    replaced += name in names
    return changes, Taken(new, replaced, len(going))


def _by_key(decisions: Iterable[Decision]) -> dict[str, list[Decision]]:
    by_key: dict[str, list[Decision]] = {}
    for decision in decisions:
        by_key.setdefault(decision.key, []).append(decision)
    return by_key


def prevailing(decisions: Iterable[Decision]) -> list[Decision]:
    """Returns the prevailing decisions of one key: at most two."""
    best: dict[bool, Decision] = {}
    for decision in decisions:
        deterministic = decision.problem.deterministic
        if deterministic not in best or _beats(decision, best[deterministic]):
            best[deterministic] = decision
    plain, strict = best.get(False), best.get(True)
    if plain and strict and admits(plain.workspace_limit, strict.workspace_limit):
        return [plain]
    return [decision for decision in (plain, strict) if decision]


def measured_at(decision: Decision) -> tuple[int, str]:
    """Returns the revision and the UTC time of the measurement, a pair that sorts chronologically.

    A time in the future comes from a wrong clock. An empty text, which sorts first, replaces it.
    """
    revision, time = _stated_time(decision)
    return revision, time if time <= utc_text(datetime.now(UTC)) else ""


def as_latest(decision: Decision, known: Iterable[Decision]) -> Decision:
    """Returns ``decision`` as it is among ``known``, or else with a revision that makes it later
    than all of them."""
    stated = []
    for other in known:
        if _with_revision(other, decision.provenance.revision) == decision:
            return other
        stated.append(_stated_time(other))
    latest = max(stated, default=None)
    if latest is None or latest < measured_at(decision):
        return decision
    return _with_revision(decision, latest[0] + 1)


def _stated_time(decision: Decision) -> tuple[int, str]:
    return decision.provenance.revision, decision.provenance.time


def _with_revision(decision: Decision, revision: int) -> Decision:
    return replace(decision, provenance=replace(decision.provenance, revision=revision))


def _beats(one: Decision, other: Decision) -> bool:
    """Returns whether ``one`` prevails over ``other``, which has the same ``deterministic``."""
    if one.workspace_limit != other.workspace_limit:
        return admits(one.workspace_limit, other.workspace_limit)
    if _allowed_ms(one) != _allowed_ms(other):
        return _allowed_ms(one) > _allowed_ms(other)
    if measured_at(one) != measured_at(other):
        return measured_at(one) > measured_at(other)
    # Two measurements of the same time are ordered by their text, so that every process agrees.
    return repr(one) > repr(other)


def _allowed_ms(decision: Decision) -> float:
    """Returns the budget in ms if it cut the search short, and infinity otherwise."""
    budget_ms = decision.selection.evidence.budget_ms
    return math.inf if budget_ms is None else budget_ms
