"""Functions that run after the import of another module, without importing it.

Some parts of torch (Inductor, the FLOP counter) take registrations but are slow to import, and most
programs never use them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_registrations: dict[str, Callable[[ModuleType], None]] = {}


def after_import(name: str, register: Callable[[ModuleType], None]) -> None:
    """Calls ``register(module)`` now if the module is loaded, and after each import of it.

    A module is imported again if its import has failed, and if it is reloaded. ``register`` runs
    while the importing thread holds the module's lock, so it imports nothing within ``IMPORTING``.
    """
    _registrations[name] = register
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if name in sys.modules:
        register(sys.modules[name])


class _Finder(importlib.abc.MetaPathFinder):
    """The finder that finds awaited modules by the other finders, and wraps their loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        register = _registrations.get(fullname)
        if register is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
