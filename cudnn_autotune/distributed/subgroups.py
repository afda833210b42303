"""Who can use whose measurements: the ranks of a group whose GPUs and libraries are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.store.environment import Environment


def meet(exchange: Exchange, environment: Environment, terms: Mapping[str, Any]) -> tuple[int, ...]:
    """Waits for all ranks of the group.

    Args:
        environment: of this rank's GPU.
        terms: what has to be equal on all ranks, as plain JSON.

    Returns:
        The ranks (places in the group, ascending) of this environment, this one among them.

    Raises:
        DistributedTuningError: terms differ; a rank did not come.
    """

    def sort(hellos: dict[int, Any]) -> list[list[int]]:
        subgroups: dict[str, list[int]] = {}
        for rank, hello in hellos.items():
            _compare(exchange, hellos[0]["terms"], hello["terms"], rank)
            told = json.dumps(hello["environment"], sort_keys=True)
            subgroups.setdefault(told, []).append(rank)
        return list(subgroups.values())

    hello = {"environment": environment.to_json(), "terms": terms}
    everybody = range(exchange.members.size)
    subgroups = exchange.combine("hello", hello, everybody, sort)
    return next(tuple(ranks) for ranks in subgroups if exchange.members.rank in ranks)


def _compare(
    exchange: Exchange, wanted: Mapping[str, Any], given: Mapping[str, Any], rank: int
) -> None:
    for name in {**wanted, **given}:
        if wanted.get(name) != given.get(name):
            first = exchange.members.ranks[0]
            exchange.fail(
                rank,
                f"{name} must be {wanted.get(name)!r}, as on rank {first}, "
                f"and is {given.get(name)!r}",
            )
