"""Where decisions are kept between processes, and how they are used: settings of this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from cudnn_autotune.store import Environment, Layered, Store
from cudnn_autotune.store.folder import SUFFIX, located
from cudnn_autotune.store.notices import warn_once
from cudnn_autotune.store.process_lock import LOCK

MODE_VARIABLE = "CUDNN_AUTOTUNE_CACHE"
STORE_MODES = ("off", "read", "read_write", "retune")
_READS = ("read", "read_write")
_WRITES = ("read_write", "retune")

StorePath = str | PathLike[str]


@dataclass(frozen=True)
class StoreSettings:
    """Where decisions are kept between processes."""

    path: Path | None = None
    """A folder, or a file ending in ``.json``; None: the default folder."""
    mode: str = "read_write"
    shipped: tuple[Path, ...] = ()
    """Asked where the user's own store knows nothing; never written to."""


_settings = StoreSettings()
_stores: dict[int, Layered] = {}


class _Keep(Enum):
    AS_IT_IS = "as it is"


_KEEP = _Keep.AS_IT_IS


def set_store(
    path: StorePath | Literal[_Keep.AS_IT_IS] | None = _KEEP,
    *,
    mode: str | None = None,
    shipped: Iterable[StorePath] | None = None,
) -> None:
    """Sets where decisions are kept, and how they are used. What is not given, and a mode or
    ``shipped`` of None, stays as it is.

    Args:
        path: a folder, in which each kind of GPU and version of cuDNN has its own file, or a file
            ending in ``.json``; None: ``CUDNN_AUTOTUNE_CACHE_DIR``, else the user's cache folder.
        mode: ``"read_write"``, ``"read"``, ``"off"``, or ``"retune"``: tunes what the store knows,
            and replaces it (what a budget cuts short does not replace what none did).
        shipped: files or folders with decisions that came along with an application: asked where
            ``path`` knows nothing, never written to. Those of other GPUs and versions of cuDNN are
            passed over.

    Paths may be relative to the current folder, as it is at this call, or begin with ``~``.

    Raises:
        ValueError: an unknown mode; one path for ``shipped``, which takes several.
        TypeError: what is no path.
    """
    global _settings
    changes: dict[str, Any] = {}
    if path is not _KEEP:
        changes["path"] = None if path is None else located(path)
    if mode is not None:
        changes["mode"] = check_store_mode(mode)
    if shipped is not None:
        changes["shipped"] = _shipped(shipped)
    with LOCK:
        _settings = replace(_settings, **changes)
        _stores.clear()


def _shipped(paths: Iterable[StorePath]) -> tuple[Path, ...]:
    if isinstance(paths, (str, bytes, PathLike)):
        raise ValueError(f"shipped must be a list of paths, got one: {paths!r}")
    if not isinstance(paths, Iterable):
        raise TypeError(f"shipped must be a list of paths, got {paths!r}")
    found = tuple(located(one, "shipped") for one in paths)
    for one in found:
        if one.suffix == SUFFIX and not os.path.exists(one):
            warn_once((one, "shipped"), f"shipped: {one} does not exist")
    return found


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
    """Sets the mode from ``CUDNN_AUTOTUNE_CACHE``, or to the default where it says nothing. What is
    not allowed is warned of, and nothing is kept: who sets it does not want the default."""
    text = environ.get(MODE_VARIABLE, "").strip()
    try:
        mode = check_store_mode(text or StoreSettings().mode, MODE_VARIABLE)
    except ValueError as error:
        mode = "off"
        warn_once((MODE_VARIABLE, text), f"{error}: nothing is read or kept")
    set_store(mode=mode)


def get_store(device: int | None = None) -> Store:
    """The user's store of a CUDA device (an index; None: the current one), or of this machine where
    there is none. ValueError for a device that is not there."""
    return layers(device).user


def layers(device: int | None) -> Layered:
    """The user's store of a device, and what was shipped; raises as :func:`get_store`."""
    index = _index(device)
    with LOCK:
        if index not in _stores:
            here = Environment.of(index)
            _stores[index] = Layered(
                Store(_settings.path, here, read_only=not is_written()),
                [Store(one, here, read_only=True) for one in _settings.shipped],
            )
        return _stores[index]


def _index(device: int | None) -> int:
    """Without a GPU there is one store, at 0."""
    has_gpu = torch.cuda.is_available()
    if device is None:
        return torch.cuda.current_device() if has_gpu else 0
    count = torch.cuda.device_count() if has_gpu else 1
    if type(device) is not int or not 0 <= device < count:
        raise ValueError(
            f"device must be None or the index of one of {count} CUDA device(s), got {device!r}"
        )
    return device


def is_read() -> bool:
    return _settings.mode in _READS


def is_written() -> bool:
    return _settings.mode in _WRITES
