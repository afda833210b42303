"""Which decisions of one key are kept: an order in which it does not matter who came first.

Three things count, in this order: how much workspace was allowed when it was measured, since a
decision that was measured under looser constraints answers tighter ones too; whether a budget left
something out; and the moment: what has replaced another one is later than that, whatever the clocks
said. At most two remain: the one without determinism, and one with it
where that was allowed more workspace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from cudnn_autotune.store.decision import Decision, admits
from cudnn_autotune.store.provenance import utc_text


def prevailing(decisions: Iterable[Decision]) -> list[Decision]:
    """Those of ``decisions``, all of one key, that are kept."""
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
    """When it was measured, in an order that sorts as times do. A time that is yet to come tells of
    a clock that was wrong, and nothing of when that was: it is before all others."""
    revision, time = _stated_time(decision)
    return revision, time if time <= utc_text(datetime.now(UTC)) else ""


def as_latest(decision: Decision, known: Iterable[Decision]) -> Decision:
    """``decision``, with a revision by which its moment is after those of all ``known``, now and
    whenever they are compared; one that is among them already stays the one that it is."""
    said = []
    for other in known:
        if _with_revision(other, decision.provenance.revision) == decision:
            return other
        said.append(_stated_time(other))
    latest = max(said, default=None)
    if latest is None or latest < measured_at(decision):
        return decision
    return _with_revision(decision, latest[0] + 1)


def _stated_time(decision: Decision) -> tuple[int, str]:
    return decision.provenance.revision, decision.provenance.time


def _with_revision(decision: Decision, revision: int) -> Decision:
    return replace(decision, provenance=replace(decision.provenance, revision=revision))


def _beats(one: Decision, other: Decision) -> bool:
    """Of two that were measured alike as to determinism."""
    if one.workspace_limit != other.workspace_limit:
        return admits(one.workspace_limit, other.workspace_limit)
    if _allowed_ms(one) != _allowed_ms(other):
        return _allowed_ms(one) > _allowed_ms(other)
    if measured_at(one) != measured_at(other):
        return measured_at(one) > measured_at(other)
    # Two of the same moment are settled alike everywhere.
    return _text(one) > _text(other)


def _allowed_ms(decision: Decision) -> float:
    """The budget, where it left something out."""
    budget_ms = decision.selection.evidence.budget_ms
    return math.inf if budget_ms is None else budget_ms


def _text(decision: Decision) -> str:
    return json.dumps(decision.to_json(), sort_keys=True)
