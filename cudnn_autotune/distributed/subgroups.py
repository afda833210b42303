"""Who can use whose measurements: the ranks of a group whose GPUs and libraries are equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudnn_autotune.distributed.exchange import Exchange
from cudnn_autotune.store.environment import Environment


@dataclass(frozen=True)
class Subgroup:
    """The ranks (places in the group, ascending) of one environment, this one among them."""

    ranks: tuple[int, ...]
    told: Mapping[int, Any]
    """What each of them said of itself when it came."""

    @property
    def first(self) -> int:
        return self.ranks[0]


def meet(
    exchange: Exchange, environment: Environment, terms: Mapping[str, Any], tells: Any
) -> Subgroup:
    """Waits for all ranks of the group.

    Args:
        environment: of this rank's GPU.
        terms: what has to be equal on all ranks, as plain JSON.
        tells: what the ranks of the same environment should know of this one, as plain JSON.

    Raises:
        DistributedTuningError: terms differ; a rank did not come.
    """
    mine = environment.to_json()
    exchange.put("hello", {"environment": mine, "terms": terms, "tells": tells})
    hellos = exchange.gather("hello")
    expected = hellos[0]["terms"]
    for rank, hello in hellos.items():
        for name in {**expected, **hello["terms"]}:
            wanted, given = expected.get(name), hello["terms"].get(name)
            if given != wanted:
                first = exchange.members.ranks[0]
                exchange.fail(
                    rank, f"{name} must be {wanted!r}, as on rank {first}, and is {given!r}"
                )
    ranks = tuple(rank for rank, hello in hellos.items() if hello["environment"] == mine)
    return Subgroup(ranks, {rank: hellos[rank]["tells"] for rank in ranks})
