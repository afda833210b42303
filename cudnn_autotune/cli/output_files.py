"""Files that a command writes. They are tried before anything is measured."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from cudnn_autotune.audit.plot import SUFFIXES
from cudnn_autotune.cli.options import refuse
from cudnn_autotune.core import atomic_file

force_option = click.option("--force", is_flag=True, help="Replace what is there.")
"""``--force``, for :func:`check_new`."""


def drawable(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """The callback of an option for a file that matplotlib is to draw."""
    if value is None:
        return None
    if value.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"must end in {', '.join(SUFFIXES)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise click.BadParameter(f"needs matplotlib: {error}") from error
    return value


def check_new(option: str, path: Path, force: bool) -> None:
    """Raises BadParameter if the path exists and ``--force`` was not given, or if it leads to
    something else than a regular file."""
    if os.path.exists(path) and not force:
        raise refuse(option, f"{path} is there already; --force replaces it")
    try:
        atomic_file.check_regular(atomic_file.followed(path))
    except OSError as error:
        raise refuse(option, f"cannot write {path}: {error.strerror or error}") from error


def check_output(option: str, path: Path | None) -> None:
    """Makes the folder of a file that is to be written, and tries to write in it. Raises
    BadParameter if no regular file can be written there."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise refuse(option, f"cannot write {path}: {error.strerror}") from error
    if path.exists() and not path.is_file():
        raise refuse(option, f"{path} is no regular file")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns an OSError within into a ClickException that names the option and the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise click.ClickException(f"{option}: cannot write {path}: {reason}") from error


def write(option: str, path: Path, data: bytes) -> None:
    """Writes a whole file, and makes its folder. Raises BadParameter if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(path, data)
    except OSError as error:
        raise refuse(option, f"cannot write {path}: {error.strerror or error}") from error
