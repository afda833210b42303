"""A user's store in front of the stores that an application shipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store


class Layered:
    """Asks the user's store first, to which changes are written, then the stores that an
    application shipped in order, and takes the first answer. All must be of one environment
    (ValueError)."""

    def __init__(self, user: Store, shipped: Sequence[Store] = ()) -> None:
        for store in shipped:
            if store.environment != user.environment:
                raise ValueError(
                    f"shipped must be stores of {user.environment.file_name}, got one of "
                    f"{store.environment.file_name}"
                )
        self.user = user
        self.shipped = tuple(shipped)

    def find(
        self,
        problem: ConvProblem,
        *,
        suffices: Callable[[Decision], bool] = lambda decision: True,
        **policy: Any,
    ) -> Decision | None:
        """Returns the first decision that ``Store.find`` finds in the stores and that suffices, or
        None."""
        found = (store.find(problem, **policy) for store in (self.user, *self.shipped))
        return next((one for one in found if one is not None and suffices(one)), None)

    def by_key(self, key: str) -> Decision | None:
        """Returns the first decision that ``Store.by_key`` finds in the stores, or None."""
        found = (store.by_key(key) for store in (self.user, *self.shipped))
        return next((decision for decision in found if decision is not None), None)

    def nearest(self, problem: ConvProblem, most: int = 3) -> list[str]:
        """Returns up to ``most`` keys of decisions in any of the stores for the problems most
        similar to ``problem``, the nearest first; see ``Store.nearest``."""
        stores = (self.user, *self.shipped)
        found = {pair for store in stores for pair in store.nearest(problem, most)}
        return [key for _, key in sorted(found)[:most]]

    def keys(self) -> Iterator[str]:
        """Returns the keys of all stores, each key once, those of the user's store first."""
        keys = chain.from_iterable(store.keys() for store in (self.user, *self.shipped))
        return iter(dict.fromkeys(keys))

    def reject(self, answer: Decision) -> None:
        """Calls ``Store.reject`` of every store. Shipped ones, which are read-only, remember the
        rejection in this process only."""
        for store in (self.user, *self.shipped):
            store.reject(answer)

    def add(self, decisions: Iterable[Decision], *, are_latest: bool = False) -> None:
        """Adds decisions to the user's store; see ``Store.add``."""
        self.user.add(decisions, are_latest=are_latest)
