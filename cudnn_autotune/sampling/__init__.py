"""Keeps the sampling modes by name; :func:`register` adds one."""

from __future__ import annotations

import os

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.core.late import imported
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.strategy import (
    Candidates,
    Limits,
    Strategy,
    Traits,
    check_mode_name,
    traits_of,
)
from cudnn_autotune.timers.timer import Batch, GpuState, Sample, Timer

__all__ = [
    "Batch",
    "Candidates",
    "Evidence",
    "GpuState",
    "Limits",
    "Measurement",
    "Sample",
    "Selection",
    "Strategy",
    "Timer",
    "Traits",
    "get",
    "names",
    "register",
    "traits",
]

VARIABLE = "CUDNN_AUTOTUNE_SAMPLING"
_strategies: dict[str, Strategy | str] = {}
"""The modes, or the places of those that nothing has asked for yet, as ``module:name``."""


def register(strategy: Strategy) -> None:
    """Makes ``strategy`` available as ``sampling=strategy.name``.

    Raises:
        TypeError: ``strategy`` has no ``name`` or no method ``select``, or is a class, or one of
            its :class:`Traits` has another type.
        ValueError: the name is empty, is not printable, has quotes or backslashes in it, or belongs
            to another strategy.
    """
    given = getattr(strategy, "name", None)
    if given is None or not callable(getattr(strategy, "select", None)):
        raise TypeError(f"strategy must have a name and a method select, got {shown(strategy)}")
    if isinstance(strategy, type):
        raise TypeError(f"strategy must be an instance, got the class {strategy.__name__}")
    name = check_mode_name(given, "strategy.name")
    if name in _strategies and get(name) is not strategy:
        raise ValueError(f"strategy.name: {name!r} is registered already")
    traits_of(strategy)
    _C.register_sampling(name)
    _strategies[name] = strategy


def register_place(name: str, place: str) -> None:
    """Makes a mode available that is imported when it is first asked for.

    Args:
        name: the mode's name.
        place: its module, and the name of the mode or its class there, as ``module:name``.
    """
    _C.register_sampling(name)
    _strategies.setdefault(name, place)


def check(name: object, argument: str | None = None) -> str:
    """Returns ``name`` if a mode of that name is registered. Compilers trace it.

    Args:
        argument: what the error text calls the name; None stands for the environment variable if
            the name comes from it, else for ``sampling``.

    Raises:
        ValueError: no mode of that name is registered; the text lists those that are.
    """
    if isinstance(name, str) and name in _strategies:
        return name
    if argument is None:
        argument = VARIABLE if os.environ.get(VARIABLE, "").strip() == name else "sampling"
    allowed = ", ".join(map(repr, _strategies))
    raise ValueError(f"{argument} must be one of {allowed}, got {shown(name)}")


def get(name: object) -> Strategy:
    """Returns the mode of that name; raises as :func:`check`."""
    name = check(name)
    found = _strategies[name]
    if isinstance(found, str):
        mode = imported(found)
        found = _strategies[name] = mode() if isinstance(mode, type) else mode
    return found


def traits(name: object) -> Traits:
    """Returns what the mode of that name declares; raises as :func:`get`."""
    return traits_of(get(name))


def names() -> tuple[str, ...]:
    """Returns the names of all modes in the order of registration."""
    return tuple(_strategies)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
