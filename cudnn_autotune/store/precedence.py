"""Which decisions of one key are kept: an order in which it does not matter who came first.

Two things count, in this order: how much was allowed when it was measured, since a decision that
was measured under looser constraints answers tighter ones too; and the time. At most two remain:
the one without determinism, and one with it where that was allowed more workspace.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from cudnn_autotune.store.decision import Decision, admits


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


def _beats(one: Decision, other: Decision) -> bool:
    """Of two that were measured alike as to determinism."""
    if one.workspace_limit != other.workspace_limit:
        return admits(one.workspace_limit, other.workspace_limit)
    if one.provenance.time != other.provenance.time:
        return one.provenance.time > other.provenance.time
    # Two of the same moment are settled alike everywhere.
    return _text(one) > _text(other)


def _text(decision: Decision) -> str:
    return json.dumps(decision.to_json(), sort_keys=True)
