"""Which decisions of one key are kept: an order in which it does not matter who came first.

Three things count, in this order: how much workspace was allowed when it was measured, since a
decision that was measured under looser constraints answers tighter ones too; whether a budget left
something out; and the moment. At most two remain: the one without determinism, and one with it
where that was allowed more workspace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
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


def moment(decision: Decision) -> str:
    """When it was measured, as texts that sort as times do. A time that is yet to come tells of a
    clock that was wrong, and nothing of when that was: it is before all others."""
    time = decision.provenance.time
    return time if time <= utc_text(datetime.now(UTC)) else ""


def _beats(one: Decision, other: Decision) -> bool:
    """Of two that were measured alike as to determinism."""
    if one.workspace_limit != other.workspace_limit:
        return admits(one.workspace_limit, other.workspace_limit)
    if _allowed_ms(one) != _allowed_ms(other):
        return _allowed_ms(one) > _allowed_ms(other)
    if moment(one) != moment(other):
        return moment(one) > moment(other)
    # Two of the same moment are settled alike everywhere.
    return _text(one) > _text(other)


def _allowed_ms(decision: Decision) -> float:
    """The budget, where it left something out."""
    budget_ms = decision.selection.evidence.budget_ms
    return math.inf if budget_ms is None else budget_ms


def _text(decision: Decision) -> str:
    return json.dumps(decision.to_json(), sort_keys=True)
