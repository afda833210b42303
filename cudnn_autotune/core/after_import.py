"""Runs a function once another module has been imported, without importing it first.

Some parts of torch (Inductor, the FLOP counter) take registrations but are slow to import, and most
programs never use them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_pending: dict[str, Callable[[ModuleType], None]] = {}


def after_import(name: str, register: Callable[[ModuleType], None]) -> None:
    """Calls ``register(module)`` once: now if the module is loaded, else when it is imported."""
    if name in sys.modules:
        register(sys.modules[name])
        return
    _pending[name] = register
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds awaited modules by the other finders, and wraps their loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        register = _pending.pop(fullname, None)
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
