"""Where a store's file lies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cudnn_autotune.store.environment import Environment

SUFFIX = ".json"
FOLDER_VARIABLE = "CUDNN_AUTOTUNE_CACHE_DIR"


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``CUDNN_AUTOTUNE_CACHE_DIR``, else ``$XDG_CACHE_HOME/cudnn_autotune``, else
    ``~/.cache/cudnn_autotune``."""
    named = environ.get(FOLDER_VARIABLE, "").strip()
    if named:
        return Path(os.path.expanduser(named))
    caches = environ.get("XDG_CACHE_HOME", "").strip()
    # A relative path is to be ignored, says the XDG Base Directory Specification.
    if os.path.isabs(caches):
        return Path(caches, "cudnn_autotune")
    try:
        return Path.home() / ".cache" / "cudnn_autotune"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir(), f"cudnn_autotune-{os.getuid()}")


def located(path: str | os.PathLike[str], argument: str = "path") -> Path:
    """An absolute path, ``~`` resolved. TypeError naming the argument where it is none."""
    try:
        return Path(os.path.expanduser(os.fsdecode(path))).absolute()
    except TypeError as error:
        raise TypeError(f"{argument} must be a path, got {path!r}") from error


def file_in(path: str | os.PathLike[str] | None, environment: Environment) -> Path:
    """The file for ``environment``.

    Args:
        path: a file (``*.json``), or a folder with one file for each environment; None: the
            default folder.

    Raises:
        TypeError: ``path`` is not a path.
    """
    place = default_folder() if path is None else located(path)
    if names_file(place):
        return place
    return place / environment.file_name


def names_file(place: Path) -> bool:
    """Whether it is one file of a store; else its folder. Neither need be there."""
    return place.suffix == SUFFIX and not os.path.isdir(place)
