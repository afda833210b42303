"""Files that a command is to write: tried before anything is measured, and failing in a line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from cudnn_autotune.cli.options import refuse


def force_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--force``, for :func:`check_new`."""
    return click.option("--force", is_flag=True, help="Replace what is there.")(command)


def check_new(option: str, path: Path, force: bool) -> None:
    """Raises BadParameter where something is there already that nobody allowed to replace."""
    if os.path.exists(path) and not force:
        raise refuse(option, f"{path} is there already; --force replaces it")


def check_output(option: str, path: Path | None) -> None:
    """Makes the folder of a file that is to be written, and tries whether that will do: before
    anything is measured. Raises BadParameter."""
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
    """An OSError within becomes a ClickException that names the option and the file."""
    try:
        yield
    except OSError as error:
        told = error.strerror or error
        raise click.ClickException(f"{option}: cannot write {path}: {told}") from error
