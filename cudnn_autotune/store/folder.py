"""Paths of a store: its default folder, and the file of an environment in a folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cudnn_autotune.store.environment import Environment

SUFFIX = ".json"
FOLDER_VARIABLE = "CUDNN_AUTOTUNE_CACHE_DIR"


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the user's store.

    It is ``CUDNN_AUTOTUNE_CACHE_DIR``, else ``$XDG_CACHE_HOME/cudnn_autotune``, else
    ``~/.cache/cudnn_autotune``, else, for a user without a home, a folder in the temporary one.
    """
    named = environ.get(FOLDER_VARIABLE, "").strip()
    if named:
        return Path(os.path.expanduser(named))
    caches = environ.get("XDG_CACHE_HOME", "").strip()
    # The XDG Base Directory Specification says that a relative path must be ignored.
    if os.path.isabs(caches):
        return Path(caches, "cudnn_autotune")
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home, as in some containers
        return Path(tempfile.gettempdir(), f"cudnn_autotune-{os.getuid()}")
    return Path(home, ".cache", "cudnn_autotune")


def located(path: str | os.PathLike[str], argument: str = "path") -> Path:
    """Returns ``path`` as an absolute path, with a leading ``~`` expanded. Raises TypeError that
    names ``argument`` if it is not a path."""
    try:
        return Path(os.path.expanduser(os.fsdecode(path))).absolute()
    except TypeError as error:
        raise TypeError(f"{argument} must be a path, got {path!r}") from error


def file_in(path: str | os.PathLike[str] | None, environment: Environment) -> Path:
    """Returns the path of the file that holds the decisions of ``environment``; ``path`` is that
    file, or a folder (None: the default one). Raises as :func:`located`."""
    place = default_folder() if path is None else located(path)
    return place if names_file(place) else place / environment.file_name


def names_file(place: Path) -> bool:
    """Returns whether ``place`` is the path of one file of a store, which need not exist, and not
    of its folder."""
    return place.suffix == SUFFIX and not os.path.isdir(place)
