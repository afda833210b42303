"""Where decisions are kept between processes, and how they are used: settings of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from cudnn_autotune.store import Environment, Layered, Store

STORE_MODES = ("off", "read", "read_write", "retune")
READS = ("read", "read_write")
WRITES = ("read_write", "retune")

StorePath = str | PathLike[str]


@dataclass(frozen=True)
class StoreSettings:
    """Where decisions are kept between processes."""

    path: Path | None = None
    """A folder, or a file ending in ``.json``; None: the default folder."""
    mode: str = "read_write"
    shipped: tuple[Path, ...] = ()
    """Asked where the user's own store knows nothing; never written to."""


_lock = threading.RLock()
_settings = StoreSettings()
_stores: dict[int | None, Layered] = {}


class _Keep(Enum):
    AS_IT_IS = "as it is"


_KEEP = _Keep.AS_IT_IS


def set_store(
    path: StorePath | Literal[_Keep.AS_IT_IS] | None = _KEEP,
    *,
    mode: str | None = None,
    shipped: Iterable[StorePath] | None = None,
) -> None:
    """Sets where decisions are kept, and how they are used. What is not given stays as it is.

    Args:
        path: a folder, in which each kind of GPU and version of cuDNN has its own file, or a file
            ending in ``.json``; None: ``CUDNN_AUTOTUNE_CACHE_DIR``, else the user's cache folder.
        mode: ``"read_write"``, ``"read"``, ``"off"``, or ``"retune"``: tunes what the store knows,
            and replaces it.
        shipped: files or folders with decisions that came along with an application: asked where
            ``path`` knows nothing, never written to.

    Raises:
        ValueError: an unknown mode.
    """
    global _settings
    changes: dict[str, Any] = {}
    if path is not _KEEP:
        changes["path"] = None if path is None else Path(path)
    if mode is not None:
        changes["mode"] = check_store_mode(mode)
    if shipped is not None:
        changes["shipped"] = tuple(Path(one) for one in shipped)
    with _lock:
        _settings = replace(_settings, **changes)
        _stores.clear()


def check_store_mode(mode: object, argument: str = "mode") -> str:
    if not isinstance(mode, str) or mode not in STORE_MODES:
        allowed = ", ".join(map(repr, STORE_MODES))
        raise ValueError(f"{argument} must be one of {allowed}, got {mode!r}")
    return mode


def get_store_settings() -> StoreSettings:
    return _settings


def restore_settings(settings: StoreSettings) -> None:
    set_store(settings.path, mode=settings.mode, shipped=settings.shipped)


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """``CUDNN_AUTOTUNE_CACHE``: the mode. ValueError naming the variable."""
    mode = environ.get("CUDNN_AUTOTUNE_CACHE", "").strip() or StoreSettings().mode
    set_store(mode=check_store_mode(mode, "CUDNN_AUTOTUNE_CACHE"))


def get_store(device: int | None = None) -> Store:
    """The user's store of a CUDA device (an index; None: the current one)."""
    return layers(device).user


def layers(device: int | None) -> Layered:
    """The user's store of a device, and what was shipped."""
    with _lock:
        if device not in _stores:
            here = Environment.of(device)
            is_for_reading = _settings.mode not in WRITES
            _stores[device] = Layered(
                Store(_settings.path, here, read_only=is_for_reading),
                [Store(one, here, read_only=True) for one in _settings.shipped],
            )
        return _stores[device]


def is_read() -> bool:
    return _settings.mode in READS


def is_written() -> bool:
    return _settings.mode in WRITES
