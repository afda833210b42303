"""Ranks that tuned on their own settle on one decision for each problem."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.distributed.members import check_timeout_s, members_of
from cudnn_autotune.distributed.subgroups import meet
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning import remembering
from cudnn_autotune.tuning.choice_log import choices

Claims = Mapping[int, Mapping[str, Any]]


def agree(group: dist.ProcessGroup | None = None, timeout_s: float = 600.0) -> list[Decision]:
    """Leaves every rank with the same choices, of those that ranks have made on their own.

    Every rank of the group calls it, on its current CUDA device. For each problem (and sampling
    mode and benchmark limit) that any rank has timed, the decision that was measured under the
    loosest constraints wins, since it alone holds candidates for all of them; among those the one
    with the most timed launches; then that of the lowest rank. Ranks with unequal GPUs or versions
    of cuDNN agree among their equals. What no rank has timed is left alone.

    Args:
        group: None: the default group.
        timeout_s: how many seconds a rank may take to come.

    Returns:
        What was installed: the same list on all ranks of equal environments. On the only rank of a
        group, or without torch.distributed: its own decisions.

    Raises:
        DistributedTuningError: on all ranks, and nothing is installed: a rank has raised, died or
            not come.
        ValueError: a group that this process is not in, a timeout that is not above 0.
    """
    check_timeout_s(timeout_s)
    members = members_of(group)
    if members is None:
        device, own = _tuned_here()
        decisions = list(own.values())
    else:
        with Exchange(members, timeout_s) as exchange:
            device, own = _tuned_here()
            decisions = _settled(exchange, own, Environment.of(device))
    remembering.install(decisions, device)
    return decisions


def settle(
    decisions: Iterable[Decision],
    environment: Environment,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
) -> list[Decision]:
    """:func:`agree` on given decisions, and nothing is installed."""
    check_timeout_s(timeout_s)
    members = members_of(group)
    if members is None:
        return list(_best(decisions).values())
    with Exchange(members, timeout_s) as exchange:
        return _settled(exchange, _best(decisions), environment)


def _tuned_here() -> tuple[int, dict[str, Decision]]:
    """The current device, and what was timed on it."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    own = (c.decision for c in choices() if c.device == device)
    return device, _best(decision for decision in own if decision.selection.total_samples > 0)


def _best(decisions: Iterable[Decision]) -> dict[str, Decision]:
    """One of each key."""
    best: dict[str, Decision] = {}
    for decision in decisions:
        rival = best.get(decision.key)
        if rival is None or _grounds(_claim(decision)) < _grounds(_claim(rival)):
            best[decision.key] = decision
    return best


def _settled(
    exchange: Exchange, own: Mapping[str, Decision], environment: Environment
) -> list[Decision]:
    ranks = meet(exchange, environment, {"call": "agree"})
    # Claims first, then the winners' decisions only: all that all know would be too much to send.
    claims = {key: _claim(decision) for key, decision in own.items()}
    winners = exchange.combine("claims", claims, ranks, _winners)
    mine = {k: own[k].to_json() for k, rank in winners.items() if rank == exchange.members.rank}
    exchange.put("won", mine)
    found: dict[str, Decision] = {}
    for rank, won in exchange.gather("won", ranks).items():
        for key, tree in won.items():
            try:
                decision = Decision.from_json(tree, f"decision {key}")
            except ValueError as error:
                exchange.fail(rank, f"it has sent no decision: {error}")
            if decision.key != key or winners.get(key) != rank:
                exchange.fail(rank, f"it has sent what nobody expected: {decision.key}")
            found[key] = decision
    missing = [key for key in winners if key not in found]
    if missing:
        exchange.fail(winners[missing[0]], f"it has not sent its decision on {missing[0]}")
    exchange.agree()
    return [found[key] for key in winners]


def _claim(decision: Decision) -> dict[str, Any]:
    return {
        "deterministic": decision.problem.deterministic,
        "workspace_limit": decision.workspace_limit,
        "samples": decision.selection.total_samples,
    }


def _grounds(claim: Mapping[str, Any]) -> tuple[bool, float, int]:
    """Less is better."""
    limit = claim["workspace_limit"]
    return (
        bool(claim["deterministic"]),
        -math.inf if limit is None else -float(limit),
        -int(claim["samples"]),
    )


def _winners(claims: Claims) -> dict[str, int]:
    """The rank that wins each key; keys in the order of the ranks that brought them up first."""
    keys = dict.fromkeys(key for rank in sorted(claims) for key in claims[rank])
    return {
        key: min(
            (rank for rank in sorted(claims) if key in claims[rank]),
            key=lambda rank: (_grounds(claims[rank][key]), rank),
        )
        for key in keys
    }
