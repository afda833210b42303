"""Folders of locked stores, and their warnings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudnn_autotune.store import notices

COUNTED = "not in the locked store: "
"""The beginning of the reasons of ``fallbacks()`` for what a locked store lacks."""


def forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one that has given no warning yet."""
    monkeypatch.setattr(notices, "_given", set())


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file in a folder, by its path."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
