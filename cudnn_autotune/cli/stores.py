"""``--store``, and how a command reads the files that it names. Nothing here writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cudnn_autotune.cli.wording import say
from cudnn_autotune.core.display import count, printable
from cudnn_autotune.store import codec, disk_file, file_format
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import (
    SUFFIX,
    Environment,
    default_folder,
    file_in,
    names_file,
)
from cudnn_autotune.tools.options import refuse, refusing

_MOST_COMPLAINTS = 3


def store_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--store",
        "store_path",
        type=click.Path(path_type=Path),
        callback=_expanded,
        metavar="PATH",
        help=f"A store's folder, or one file of it ({SUFFIX}). [default: the user's]",
    )(command)


def _expanded(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    # No shell expands `--store=~/tuned`, and a Store does.
    return None if value is None else Path(os.path.expanduser(value))


MayPass = Callable[[str], bool]
"""A function that returns, for a ``Decision.key``, whether to parse the decision."""


def nothing(key: str) -> bool:
    """Passes no decision, for callers that only count them."""
    return False


@dataclass
class StoreFile:
    """The content of a store's file. Its decisions are decoded when they are asked for."""

    path: Path
    environment: Environment
    lines: dict[bytes, bytes]
    """The entries that were asked for, name to line."""
    count: int
    """The number of all entries."""
    size: int
    """The file's bytes."""
    complaints: list[str]
    """Printable sentences that say what cannot be read, and why."""

    @property
    def decisions(self) -> list[Decision]:
        """The decisions that were asked for. What cannot be read is said on standard error, and
        added to the complaints."""
        decisions, left_out = self.decoded()
        self.complaints += left_out
        _complain([f"{self.path}: {complaint}" for complaint in left_out])
        return decisions

    def decoded(self) -> tuple[list[Decision], list[str]]:
        """Returns the decisions that were asked for, and why others of these cannot be read."""
        decisions, left_out = [], []
        for line in self.lines.values():
            try:
                decisions.append(codec.decode(line, self.environment))
            except ValueError as error:
                left_out.append(printable(f"left out: {error}"))
        return decisions, left_out


def kind_of(place: Path, option: str = "--store") -> str:
    """``file``, ``folder`` or ``other``; empty if nothing is there. Raises BadParameter if it
    cannot be known, without permission, say."""
    try:
        mode = os.stat(place).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise refuse(option, f"{place}: {error.strerror}") from error
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"


def folder_of(store_path: Path | None) -> Path:
    """The folder of a store's files."""
    place = default_folder() if store_path is None else store_path
    return place.parent if names_file(place) else place


def files_of(store_path: Path | None, option: str = "--store") -> list[Path]:
    """The files that exist of a store's folder, or the one that is named. Raises BadParameter if it
    cannot be known."""
    place = default_folder() if store_path is None else store_path
    files = [place]
    if not names_file(place):
        try:
            names = os.listdir(place)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise refuse(option, f"{place}: {error.strerror}") from error
        # A file that cannot even be looked at, as a link to itself, is named when it is read.
        return [
            place / name
            for name in sorted(names)
            if name.endswith(SUFFIX) and not os.path.isdir(place / name)
        ]
    return [file for file in files if kind_of(file, option) == "file"]


def read(path: Path, may_pass: MayPass | None = None) -> StoreFile:
    """Reads a store's file, with the entries that ``may_pass`` (None: all). Raises ValueError if
    the file cannot be read, or is no store."""
    try:
        data = disk_file.read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    if data is None:
        raise ValueError(f"{path}: there is no such file")
    content = file_format.decode(data)
    environment = content.environment
    if environment is None:
        raise ValueError(printable(f"{path}: no store that can be read: {content.why}"))
    complaints = []
    entries = len(content.entries)
    if content.state is file_format.State.DAMAGED:
        complaints.append(f"damaged ({content.why}): {count(entries, 'decision')} could be read")
    elif content.tail and not content.is_tail_whole:
        complaints.append("its last line is not whole")
    lines = content.entries
    if may_pass is not None:
        lines = {name: line for name, line in lines.items() if may_pass(codec.key_of(name))}
    sentences = list(map(printable, complaints))
    return StoreFile(path, environment, lines, entries, len(data), sentences)


def read_whole(path: Path) -> StoreFile:
    """Reads a file as :func:`read` does. Raises ValueError if any decision in it cannot be read."""
    found = read(path)
    _, left_out = found.decoded()
    if complaints := [*found.complaints, *left_out]:
        raise ValueError(f"{path}: {'; '.join(complaints[:_MOST_COMPLAINTS])}")
    return found


def open_store(
    store_path: Path | None, may_pass: MayPass | None = None, option: str = "--store"
) -> StoreFile | None:
    """Reads the file that a command is about; None if the folder has no file yet.

    In a folder this is the file of this machine's environment, else the only file, so that a store
    copied from elsewhere can be looked at. Unreadable parts are reported on standard error and
    among the complaints.

    Raises:
        click.BadParameter: the path is not there, cannot be read, or is no store; or there are
            several files, and none of them is of this environment.
    """
    files = None
    if store_path is not None and (kind := kind_of(store_path, option)) != "folder":
        if not kind:
            raise refuse(option, f"{store_path} does not exist")
        files = [store_path]
    files = files or files_of(store_path, option)
    folder = folder_of(store_path)
    own = folder / file_in(folder, Environment.of()).name
    unreadable: list[str] = []
    readable: list[Path] = []
    # The file of this machine comes first. If it can be read, the others are not looked at.
    for path in sorted(files, key=lambda path: path != own):
        try:
            read(path, nothing)
        except ValueError as error:
            unreadable.append(str(error))
            continue
        readable.append(path)
        if path == own:
            break
    if not readable and unreadable:
        raise refuse(option, "\n  ".join(unreadable))
    _complain(unreadable)
    if len(readable) > 1:
        listed = "".join(f"\n  {file}" for file in readable)
        raise refuse(option, f"none of its files is of this machine; name one of them:{listed}")
    if not readable:
        return None
    with refusing(option):  # the file may have changed meanwhile
        found = read(readable[0], may_pass)
    _complain([f"{found.path}: {complaint}" for complaint in found.complaints])
    found.complaints[:0] = unreadable
    return found


def _complain(lines: Sequence[str]) -> None:
    """Prints the first few lines on standard error, and the number of others."""
    for line in lines[:_MOST_COMPLAINTS]:
        say(line, err=True)
    if len(lines) > _MOST_COMPLAINTS:
        say(f"and {len(lines) - _MOST_COMPLAINTS} more", err=True)


def nothing_there(store_path: Path | None) -> str:
    """The message for a store without a file."""
    return f"{folder_of(store_path)}: nothing is stored there yet"
