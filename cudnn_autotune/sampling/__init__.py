"""The sampling modes by name; :func:`register` adds one."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.json_node import did_you_mean, shown
from cudnn_autotune.core.late import imported
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.strategy import (
    Candidates,
    Limits,
    SamplingMode,
    Strategy,
    Traits,
    check_mode_name,
    traits_of,
)
from cudnn_autotune.timers.timer import Batch, Cache, GpuState, Sample, Timer, in_portions

__all__ = [
    "Batch",
    "Cache",
    "Candidates",
    "Evidence",
    "GpuState",
    "Limits",
    "Measurement",
    "Sample",
    "SamplingMode",
    "Selection",
    "Strategy",
    "Timer",
    "Traits",
    "get",
    "in_portions",
    "names",
    "register",
    "traits",
]

VARIABLE = "CUDNN_AUTOTUNE_SAMPLING"
_places: dict[str, str | None] = {}
"""The names of all modes; for the package's, their places as ``module:name``. Compiled graphs have
a guard on it, so it changes only when a mode is registered."""
_strategies: dict[str, Strategy] = {}
"""The modes in use so far, and users' modes."""


def register(strategy: Strategy) -> None:
    """Makes ``strategy`` available as ``sampling=strategy.name``.

    Raises:
        TypeError: ``strategy`` has no ``name``, or no method ``select`` though it decides at once,
            or is a class, or one of its :class:`Traits` has another type.
        ValueError: the name is empty, is not printable, has quotes or backslashes in it, or belongs
            to another strategy.
    """
    given = getattr(strategy, "name", None)
    selects = callable(getattr(strategy, "select", None))
    if given is None or not (selects or getattr(strategy, "decides_later", False)):
        raise TypeError(f"strategy must have a name and a method select, got {shown(strategy)}")
    if isinstance(strategy, type):
        raise TypeError(f"strategy must be an instance, got the class {strategy.__name__}")
    name = check_mode_name(given, "strategy.name")
    if name in _places and get(name) is not strategy:
        raise ValueError(f"strategy.name: {name!r} is registered already")
    traits_of(strategy)
    _C.register_sampling(name)
    _strategies[name] = strategy
    _places.setdefault(name, None)


def register_places(places: Mapping[str, str]) -> None:
    """Makes modes available that are imported at their first use.

    Args:
        places: by a mode's name, its module and its name or its class's name there, as
            ``module:name``.
    """
    for name, place in places.items():
        _C.register_sampling(name)
        _places.setdefault(name, place)


def check(name: object, argument: str | None = None) -> str:
    """Returns ``name`` if a mode of that name is registered. Compilers trace it.

    Args:
        argument: the name's noun in the error text; None stands for the environment variable if the
            name comes from it, else for ``sampling``.

    Raises:
        ValueError: no mode of that name is registered; the text lists the registered ones, and
            names the nearest.
    """
    if isinstance(name, str) and name in _places:
        return name
    if argument is None:
        argument = VARIABLE if os.environ.get(VARIABLE, "").strip() == name else "sampling"
    allowed = ", ".join(map(repr, _places))
    meant = did_you_mean(name, _places)
    raise ValueError(f"{argument} must be one of {allowed}, got {shown(name)}{meant}")


def get(name: object) -> Strategy:
    """Returns the mode of that name; raises as :func:`check`."""
    name = check(name)
    if name not in _strategies:
        place = _places[name]
        assert place is not None  # a user's mode is in _strategies
        mode = imported(place)
        # Another thread may have been faster.
        _strategies.setdefault(name, mode() if isinstance(mode, type) else mode)
    return _strategies[name]


def traits(name: object) -> Traits:
    """Returns the traits of the mode of that name; raises as :func:`get`."""
    return traits_of(get(name))


def names() -> tuple[str, ...]:
    """Returns the names of all modes in the order of registration."""
    return tuple(_places)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
