"""A user's store before those that came along with an application."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.store.lookup import Lookup


class Layered(Lookup):
    """Asked from the top: what the user's store can serve is served, else the first of ``shipped``
    that can. Changes go to the user's store.

    Raises:
        ValueError: stores of different environments.
    """

    def __init__(self, user: Store, shipped: Sequence[Store] = ()) -> None:
        for store in shipped:
            if store.environment != user.environment:
                raise ValueError(
                    f"shipped must be stores of {user.environment.file_name}, got one of "
                    f"{store.environment.file_name}"
                )
        self.user = user
        self.shipped = tuple(shipped)

    def by_key(self, key: str) -> Decision | None:
        """As ``Store.by_key``."""
        found = (store.by_key(key) for store in (self.user, *self.shipped))
        return next((decision for decision in found if decision is not None), None)

    def keys(self) -> Iterator[str]:
        """Of all stores, each once, the user's first."""
        keys = chain.from_iterable(store.keys() for store in (self.user, *self.shipped))
        return iter(dict.fromkeys(keys))

    def reject(self, answer: Decision) -> None:
        """As ``Store.reject``; of what was shipped this process alone takes note."""
        for store in (self.user, *self.shipped):
            store.reject(answer)

    def add(self, decisions: Iterable[Decision], *, are_latest: bool = False) -> None:
        """To the user's store, as ``Store.add``."""
        self.user.add(decisions, are_latest=are_latest)

    def _find(self, key: str, deterministic: bool, workspace_limit: int | None) -> Decision | None:
        stores = (self.user, *self.shipped)
        found = (store._find(key, deterministic, workspace_limit) for store in stores)
        return next((decision for decision in found if decision is not None), None)
