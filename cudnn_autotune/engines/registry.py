"""The implementations of this process by name, and the texts of their candidates.

A candidate's text is ``name@version`` or ``name@version:settings``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.implementations import Implementation

_MOST = 200
"""Most characters of a version, and of settings."""
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}", re.ASCII)
_VERSION = re.compile(rf"[!-9;-?A-~]{{1,{_MOST}}}")  # printable ASCII but blanks, ':' and '@'
_SETTINGS = re.compile(rf"[!-~]{{0,{_MOST}}}")
# The beginnings of the texts of other candidates.
_RESERVED = re.compile(r"aten|matmul|unfused|eng[0-9]*")

_lock = ForkSafeLock()
_implementations: dict[str, Implementation] = {}
_load_first: Callable[[], Iterable[Implementation]] | None = None


class ImplementationError(RuntimeError):
    """An implementation is not here, in this version or with these settings, or does not build."""


class Named(NamedTuple):
    """The parts of the text of a candidate."""

    name: str
    version: str
    settings: str

    @property
    def text(self) -> str:
        return f"{self.name}@{self.version}" + (f":{self.settings}" if self.settings else "")


def is_text(text: str) -> bool:
    """Whether the text of a candidate names an implementation; no engine's text has an ``@``."""
    return "@" in text


def parse(text: str) -> Named:
    """Parses the text of an implementation's candidate.

    Raises:
        ValueError: ``text`` is none.
    """
    name, _, rest = text.partition("@")
    version, colon, settings = rest.partition(":")
    named = Named(name, version, settings)
    try:
        check_name(name)
        check_version(version)
        check_settings(settings)
        if colon and not settings:
            raise ValueError("settings must not be empty behind a ':'")
    except ValueError as error:
        raise ValueError(f"{shown(text)} is not name@version[:settings]: {error}") from None
    return named


def check_name(name: object) -> str:
    """Returns the name of an implementation; raises ValueError if it is not allowed."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _RESERVED.fullmatch(name):
        raise ValueError(
            "name must be an identifier in lower case of at most 64 characters, and not 'aten', "
            f"'matmul', 'unfused' or 'eng' with a number, got {shown(name)}"
        )
    return name


def check_version(version: object) -> str:
    """Returns the version of an implementation; raises ValueError if it is not allowed."""
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise ValueError(
            f"version must be a text of 1 to {_MOST} printable ASCII characters without blanks, "
            f"':' and '@', got {shown(version)}"
        )
    return version


def check_settings(settings: object) -> str:
    """Returns the settings of an offer; raises ValueError if they are not allowed."""
    if not isinstance(settings, str) or not _SETTINGS.fullmatch(settings):
        raise ValueError(
            f"settings must be a text of at most {_MOST} printable ASCII characters without "
            f"blanks, got {shown(settings)}"
        )
    return settings


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


def get(named: Named) -> Implementation:
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
    """Whether a candidate is of an implementation that this process does not have in any version,
    such as one of another application."""
    return is_text(text) and find(text.partition("@")[0]) is None
