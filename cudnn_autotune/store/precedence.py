"""The rules by which a store decides which decisions of one key it keeps.

The result does not depend on the order in which the decisions arrive. These are compared in turn:

1. The workspace limit of the measurement: the larger one prevails, because such a decision also
   answers questions with a tighter limit.
2. The time budget: a decision that no budget cut short prevails, else the one with the larger
   budget.
3. The time of the measurement: the later one prevails. A decision that replaced another one counts
   as later than it, even if a clock was set back.

At most two decisions remain: one that was measured without determinism, and one that was measured
with it, if it was allowed more workspace than the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from cudnn_autotune.store.decision import Decision, admits
from cudnn_autotune.store.provenance import utc_text


def prevailing(decisions: Iterable[Decision]) -> list[Decision]:
    """Returns those of one key's decisions that prevail: at most two."""
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
    than all of them for good."""
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
