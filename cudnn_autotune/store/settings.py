"""The settings of this process for its stores, and the stores themselves, one for each device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from cudnn_autotune.core.fork_safe_lock import IMPORTING, LOCK
from cudnn_autotune.core.json_node import did_you_mean
from cudnn_autotune.store.environment import (
    FOLDER_VARIABLE,
    SUFFIX,
    Environment,
    default_folder,
    located,
)
from cudnn_autotune.store.notices import WarningsPutOff, warn_once

if TYPE_CHECKING:
    from cudnn_autotune.store.file_store import Layered, Store

MODE_VARIABLE = "CUDNN_AUTOTUNE_CACHE"
StoreMode = Literal["off", "read", "read_write", "retune", "locked"]
STORE_MODES: tuple[StoreMode, ...] = get_args(StoreMode)
_READS = ("read", "read_write", "locked")
_WRITES = ("read_write", "retune")

StorePath = str | PathLike[str]


@dataclass(frozen=True)
class StoreSettings:
    """The place of decisions between processes, and its mode."""

    path: Path | None = None
    """A folder, or a file ending in ``.json``; None means the default folder."""
    mode: StoreMode = "read_write"
    """One of ``STORE_MODES``."""
    shipped: tuple[Path, ...] = ()
    """Read-only files or folders for problems without an answer in the user's store."""


_settings = StoreSettings()
_stores: dict[int, Layered] = {}
_user_stores: dict[Environment, Store] = {}


def set_store(
    path: StorePath | EllipsisType | None = ...,
    *,
    mode: StoreMode | None = None,
    shipped: Iterable[StorePath] | None = None,
) -> None:
    """Sets the place of decisions between processes, and its mode.

    Settings without an argument do not change. Paths may begin with ``~``; a relative path is
    resolved at the time of this call.

    Args:
        path: A folder, which has one file for each kind of GPU and version of cuDNN, or a file
            ending in ``.json``. None means ``CUDNN_AUTOTUNE_CACHE_DIR``, else the user's cache
            folder.
        mode: ``"read_write"``, ``"read"`` (no writes), ``"off"`` (no reads or writes),
            ``"retune"`` (no reads) or ``"locked"`` (no writes and no measurements). In ``"retune"``
            every problem is tuned again and replaces its decision, unless a budget cut only the new
            search short. In ``"locked"`` PyTorch computes what the stores lack, and ``fallbacks()``
            counts it. None changes nothing.
        shipped: Files or folders with decisions that an application ships, for problems without an
            answer in the store at ``path``. They are never written. Files of other GPUs and
            versions of cuDNN are ignored. None changes nothing.

    Raises:
        ValueError: ``mode`` is unknown, or ``shipped`` is one path instead of several. The mode is
            ``"locked"``, and the store is missing, cannot be read, or is of another cuDNN or GPU;
            then no setting changes.
        TypeError: ``path`` or an element of ``shipped`` is not a path.
    """
    changes: dict[str, Any] = {}
    if path is not ...:
        changes["path"] = None if path is None else located(path)
    if mode is not None:
        changes["mode"] = check_store_mode(mode)
    if shipped is not None:
        changes["shipped"] = _shipped(shipped)
    wanted = replace(_settings, **changes)
    if why := why_not_locked(wanted):
        raise ValueError(why)
    restore_settings(wanted)


def why_not_locked(wanted: StoreSettings, here: Environment | None = None) -> str:
    """Returns a sentence on why settings name no store that can be locked; empty if one can be, or
    need not be.

    Args:
        here: the environment of the store; None stands for what is known without using the GPU.
    """
    if wanted.mode != "locked":
        return ""
    with IMPORTING:
        from cudnn_autotune.store import locked
    places = (
        [("path", wanted.path)]
        if wanted.path is not None
        else [
            *(("shipped", path) for path in wanted.shipped),
            (f"path, or {FOLDER_VARIABLE}", default_folder()),
        ]
    )
    return locked.refusal(places, here or locked.known_environment())


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


def check_store_mode(mode: object, argument: str = "mode") -> StoreMode:
    """Returns ``mode``; raises ValueError naming ``argument`` if it is not in ``STORE_MODES``."""
    if not isinstance(mode, str) or mode not in STORE_MODES:
        allowed = ", ".join(map(repr, STORE_MODES))
        meant = did_you_mean(mode, STORE_MODES)
        raise ValueError(f"{argument} must be one of {allowed}, got {mode!r}{meant}")
    return mode


def get_store_settings() -> StoreSettings:
    """Returns the present settings, for :func:`restore_settings`."""
    return _settings


def restore_settings(settings: StoreSettings) -> None:
    """Sets all settings to a result of :func:`get_store_settings`."""
    global _settings
    with LOCK:
        _settings = settings
        _stores.clear()
        _user_stores.clear()


def read_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Sets the mode from ``CUDNN_AUTOTUNE_CACHE``, or to the default if the variable is empty.

    A forbidden value causes a warning and the mode ``off``: a user who sets the variable does not
    want the default.
    """
    text = environ.get(MODE_VARIABLE, "").strip()
    try:
        mode = check_store_mode(text or StoreSettings().mode, MODE_VARIABLE)
    except ValueError as error:
        mode = "off"
        warn_once((MODE_VARIABLE, text), f"{error}: nothing is read or kept")
    restore_settings(replace(_settings, mode=mode))


def get_store(device: int | None = None) -> Store:
    """Returns the user's store for a CUDA device, or for this machine if it has no GPU.

    Args:
        device: The device's index; None means the current device.

    Raises:
        ValueError: There is no such device.
    """
    return layers(device).user


def layers(device: int | None) -> Layered:
    """Returns the user's store, in front of the shipped ones. Arguments, errors: as get_store."""
    with IMPORTING:
        from cudnn_autotune.store.file_store import Layered, Store
    index = _index(device)
    is_new = index not in _stores
    if is_new and is_locked() and (why := why_not_locked(_settings, Environment.of(index))):
        warn_once(("locked", _settings, index), f"{why}; PyTorch computes all until then")
    with WarningsPutOff(), LOCK:
        if index not in _stores:
            here = Environment.of(index)
            _stores[index] = Layered(
                _user_store(here, Store),
                [Store(one, here, read_only=True) for one in _settings.shipped],
            )
        return _stores[index]


def user_store(environment: Environment) -> Store:
    """Returns the user's store of an environment, this machine's or another one. Equal GPUs have
    one in common."""
    with IMPORTING:
        from cudnn_autotune.store.file_store import Store
    with WarningsPutOff(), LOCK:
        return _user_store(environment, Store)


def _user_store(environment: Environment, kind: type[Store]) -> Store:
    if environment not in _user_stores:
        store = kind(_settings.path, environment, read_only=not is_written())
        _user_stores[environment] = store
    return _user_stores[environment]


def _index(device: int | None) -> int:
    """Returns the index of the device. Without a GPU the only index is 0."""
    # is_available() asks the driver each time, which takes 0.2 ms.
    has_gpu = torch.cuda.is_initialized() or torch.cuda.is_available()
    if device is None:
        return torch.cuda.current_device() if has_gpu else 0
    count = torch.cuda.device_count() if has_gpu else 1
    if type(device) is not int or not 0 <= device < count:
        allowed = f"the index of one of {count} CUDA device(s)" if has_gpu else "0 without a GPU"
        raise ValueError(f"device must be None or {allowed}, got {device!r}")
    return device


def is_read() -> bool:
    """Returns whether the mode lets decisions be read from stores."""
    return _settings.mode in _READS


def is_locked() -> bool:
    """Returns whether the mode forbids to measure what stores lack."""
    return _settings.mode == "locked"


def is_used() -> bool:
    """Returns whether the mode lets decisions be read or written."""
    return _settings.mode != "off"


def is_written() -> bool:
    """Returns whether the mode lets decisions be written to the user's store."""
    return _settings.mode in _WRITES
