"""Keeps the sampling modes by name; :func:`register` adds one."""

from __future__ import annotations

import os

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.auto import Auto
from cudnn_autotune.sampling.frontend_modes import FRONTEND_MODES
from cudnn_autotune.sampling.heuristic import Heuristic
from cudnn_autotune.sampling.online import Online
from cudnn_autotune.sampling.race import Race
from cudnn_autotune.sampling.strategy import (
    Candidates,
    Limits,
    Strategy,
    Traits,
    check_mode_name,
    traits_of,
)
from cudnn_autotune.sampling.sustained import Sustained
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
_strategies: dict[str, Strategy] = {}


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
    if name in _strategies and _strategies[name] is not strategy:
        raise ValueError(f"strategy.name: {name!r} is registered already")
    traits_of(strategy)
    _C.register_sampling(name)
    _strategies[name] = strategy


def get(name: object, argument: str | None = None) -> Strategy:
    """Returns the mode of that name.

    Args:
        argument: what the error text calls the name; None stands for the environment variable if
            the name comes from it, else for ``sampling``.

    Raises:
        ValueError: no mode of that name is registered; the text lists those that are.
    """
    if isinstance(name, str) and name in _strategies:
        return _strategies[name]
    if argument is None:
        argument = VARIABLE if os.environ.get(VARIABLE, "").strip() == name else "sampling"
    allowed = ", ".join(map(repr, _strategies))
    raise ValueError(f"{argument} must be one of {allowed}, got {shown(name)}")


def traits(name: object) -> Traits:
    """Returns what the mode of that name declares; raises as :func:`get`."""
    return traits_of(get(name))


def names() -> tuple[str, ...]:
    """Returns the names of all modes in the order of registration."""
    return tuple(_strategies)


_modes: tuple[Strategy, ...] = (
    Heuristic(),
    *FRONTEND_MODES,
    Race(),
    Sustained(),
    Auto(),
    Online(),
)
for _mode in _modes:
    register(_mode)
