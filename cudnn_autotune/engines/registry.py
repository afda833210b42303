"""The implementations of this process by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.candidate_id import CandidateId, check_name, check_version, identify
from cudnn_autotune.engines.implementations import Implementation

_lock = ForkSafeLock()
_implementations: dict[str, Implementation] = {}
_load_first: Callable[[], Iterable[Implementation]] | None = None


class ImplementationError(RuntimeError):
    """An implementation is not here, in this version or with these settings, or does not build."""


def register(implementation: Implementation) -> None:
    """Adds an implementation, behind those that are registered.

    Raises:
        ValueError: its name or version is not allowed, or another one has the name.
    """
    check_name(implementation.name)
    check_version(implementation.version)
    _add_first()
    with _lock:
        if implementation.name in _implementations:
            raise ValueError(f"name: an implementation {implementation.name!r} is registered")
        _implementations[implementation.name] = implementation


def load_first(load: Callable[[], Iterable[Implementation]]) -> None:
    """Sets what returns the package's own implementations, which are registered before all others.

    It is called when somebody first asks for an implementation, so that to import the package takes
    no longer for them.
    """
    global _load_first
    _load_first = load


def _add_first() -> None:
    global _load_first
    load = _load_first
    if load is None:
        return
    first = {one.name: one for one in load()}
    with _lock:
        if _load_first is not None:  # no other thread was faster
            _implementations.update(first)
            _load_first = None


def unregister(name: str) -> Implementation:
    """Removes and returns an implementation; raises KeyError if there is none of this name."""
    _add_first()
    with _lock:
        if name not in _implementations:
            raise KeyError(f"no implementation {shown(name)} is registered")
        return _implementations.pop(name)


def registered() -> tuple[Implementation, ...]:
    """All implementations, in the order of their registration."""
    _add_first()
    with _lock:
        return tuple(_implementations.values())


def find(name: str) -> Implementation | None:
    """The implementation of this name."""
    _add_first()
    with _lock:
        return _implementations.get(name)


def get(named: CandidateId) -> Implementation:
    """Returns the implementation of a candidate.

    Raises:
        ImplementationError: it is not registered, or in another version.
    """
    found = find(named.name)
    if found is None:
        raise ImplementationError(f"{named.text}: no implementation {named.name!r} is registered")
    if found.version != named.version:
        raise ImplementationError(
            f"{named.text}: {named.name!r} is registered in version {found.version!r}"
        )
    return found


def is_absent(text: str) -> bool:
    """Returns whether a candidate is of an implementation that this process does not have in any
    version, such as one of another application."""
    named = identify(text)
    return named.is_implementation and find(named.name) is None
