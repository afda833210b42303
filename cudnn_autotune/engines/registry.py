"""The implementations of this process by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.candidate_id import CandidateId, check_name, check_version, identify
from cudnn_autotune.engines.implementations import Implementation

_lock = ForkSafeLock()
_by_name: dict[str, Implementation] | None = None
_built_in: list[Callable[[], Sequence[Implementation]]] = []


class ImplementationError(RuntimeError):
    """The error of an implementation that is not here in this version and with these settings, or
    does not build."""


def provide_built_in(find: Callable[[], Sequence[Implementation]]) -> None:
    """Sets the function that returns the package's implementations, in the order of their offers.
    It is called once, at the first need of an implementation."""
    _built_in[:] = [find]


def _registry() -> dict[str, Implementation]:
    global _by_name
    if _by_name is None:
        built_in = [one for find in _built_in for one in find()]
        with _lock:
            if _by_name is None:  # no other thread was faster
                _by_name = {one.name: one for one in built_in}
    return _by_name


def register(implementation: Implementation) -> None:
    """Adds an implementation, behind the registered ones.

    Raises:
        ValueError: its name or version is not allowed, or another one has the name.
    """
    check_name(implementation.name)
    check_version(implementation.version)
    registry = _registry()
    with _lock:
        if implementation.name in registry:
            raise ValueError(f"name: an implementation {implementation.name!r} is registered")
        registry[implementation.name] = implementation


def unregister(name: str) -> Implementation:
    """Removes and returns an implementation; raises KeyError if there is none of this name."""
    registry = _registry()
    with _lock:
        if name not in registry:
            raise KeyError(f"no implementation {shown(name)} is registered")
        return registry.pop(name)


def registered() -> tuple[Implementation, ...]:
    """Returns all implementations, the package's first, in the order of registration."""
    registry = _registry()
    with _lock:
        return tuple(registry.values())


def find(name: str) -> Implementation | None:
    """Returns the implementation of this name, or None."""
    return _registry().get(name)


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


def calls_python(text: str) -> bool:
    """Returns whether a candidate's implementation may call Python functions in each launch. The
    first run of such a function may break the capture of a CUDA graph."""
    return getattr(find(identify(text).name), "calls_python", False)


def is_users(text: str) -> bool:
    """Returns whether a candidate's implementation is registered by a user."""
    return getattr(find(identify(text).name), "is_users", False)


def is_absent(text: str) -> bool:
    """Returns whether this process has no version of the candidate's implementation, which another
    application may have."""
    named = identify(text)
    return named.is_implementation and find(named.name) is None
