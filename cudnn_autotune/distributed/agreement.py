"""The agreement of ranks that have tuned separately on one decision for each problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.distributed.group import group_of
from cudnn_autotune.distributed.rendezvous import exchange_with
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning import remembering
from cudnn_autotune.tuning.choice_log import choices

_NO_LIMIT = 2**63


def agree(group: dist.ProcessGroup | None = None, timeout_s: float = 600.0) -> list[Decision]:
    """Installs the same choices on every rank, selected from the ranks' separate ones.

    Every rank of the group calls it, on its current CUDA device. A winner is selected for each
    timed problem, sampling mode and benchmark limit. The decision measured under the loosest
    constraints wins, since only it has candidates for all constraints; then the one with the most
    timed launches; then the lowest rank's. Ranks with unequal GPUs or versions of cuDNN agree among
    their equals. Problems that no rank has timed do not change.

    Args:
        group: None: the default group.
        timeout_s: most seconds of a rank's delay in making this call.

    Returns:
        The installed decisions, the same list on all ranks of equal environments. A single rank, or
        a process without torch.distributed, has its own ones.

    Raises:
        DistributedTuningError: on all ranks, without a change: a rank has raised, died, not made
            this call, sent an unreadable message, or has another version of this package.
        ValueError: this process is not in ``group``, or the timeout is not above 0.
    """
    members = group_of(group, timeout_s)
    if members is None:
        device, own = _tuned_here()
        decisions = list(own.values())
    else:
        with exchange_with(members, timeout_s) as exchange:
            device, own = _tuned_here()
            decisions = agreed(exchange, own, Environment.of(device))
    remembering.install(decisions, device)
    return decisions


def _tuned_here() -> tuple[int, dict[str, Decision]]:
    """Returns the current device, and the final decisions timed on it."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    own = [c.decision for c in choices() if c.device == device and not c.provisional]
    return device, best(one for one in own if one.selection.total_samples > 0)


def best(decisions: Iterable[Decision]) -> dict[str, Decision]:
    """Returns the best decision for each key."""
    found: dict[str, Decision] = {}
    for decision in decisions:
        other = found.get(decision.key)
        if other is None or _precedence(decision) < _precedence(other):
            found[decision.key] = decision
    return found


def _precedence(decision: Decision) -> list[int]:
    """Returns the precedence among decisions for a key; the smallest list wins."""
    limit = decision.workspace_limit
    return [
        int(decision.problem.deterministic),
        -(_NO_LIMIT if limit is None else limit),
        -decision.selection.total_samples,
    ]


def agreed(
    exchange: Exchange, own: Mapping[str, Decision], environment: Environment
) -> list[Decision]:
    """Returns the winning decisions, given this rank's best one by key, and ends the call."""
    ranks = exchange.handshake(environment, {"call": "agree"})
    # Only the winners' decisions are sent, since the decisions of all ranks would be too much data.
    claims = {key: _precedence(decision) for key, decision in own.items()}
    sent = exchange.combine("claims", claims, ranks, _winners, _claims)
    winners = exchange.read(ranks[0], "its list of winners", lambda: _ranks_of(sent))
    names = [f"won/{ranks[0]}/{index}" for index in range(len(winners))]
    for name, (key, rank) in zip(names, winners.items(), strict=True):
        if rank == exchange.group.rank:
            exchange.put_decision(name, own[key])
    decisions = [
        exchange.get_decision(name, partial(_is_for, key))
        for name, key in zip(names, winners, strict=True)
    ]
    exchange.agree()
    return decisions


def _is_for(key: str, decision: Decision) -> bool:
    return decision.key == key


def _claims(tree: Any) -> dict[str, list[int]]:
    return {key: [int(number) for number in claim] for key, claim in tree.items()}


def _ranks_of(tree: Any) -> dict[str, int]:
    return {key: int(rank) for key, rank in tree.items()}


def _winners(claims: Mapping[int, Mapping[str, list[int]]]) -> dict[str, int]:
    """Returns the winning rank by key, in the order of the ranks that first know the keys."""
    winners: dict[str, int] = {}
    for rank in sorted(claims):
        for key, claim in claims[rank].items():
            best = winners.setdefault(key, rank)
            if claim < claims[best][key]:
                winners[key] = rank
    return winners
