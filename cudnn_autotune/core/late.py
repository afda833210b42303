"""Names that are imported when they are first used."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from cudnn_autotune.core.fork_safe_lock import IMPORTING


@functools.cache
def imported(place: str) -> Any:
    """Returns the object that ``place`` names as ``module:name``, or the module ``module``."""
    module, _, name = place.partition(":")
    with IMPORTING:
        found = importlib.import_module(module)
    return getattr(found, name) if name else found


def late(place: str) -> Callable[..., Any]:
    """Returns a function that calls the one at ``place``, whose module the first call imports."""

    def call(*args: Any, **keywords: Any) -> Any:
        return imported(place)(*args, **keywords)

    call.__module__, _, call.__name__ = place.partition(":")
    call.__qualname__ = call.__name__
    return call
