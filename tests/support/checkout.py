"""Modules of the checkout that are not part of the installed package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]
"""The folder that the package ``support`` lies in."""
ROOT = TESTS.parent


def module(name: str) -> ModuleType:
    """Imports a module of the build, such as ``building.headers``.

    The checkout is on ``sys.path`` for the import only, so that tests of the package import the
    installed one.
    """
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT))
