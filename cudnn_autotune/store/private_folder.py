"""A folder whose files only this user can have written.

The content of its files is executed (compiled plans) or believed (checked outputs). So a file is
read only if this user owns it and its folder, and nobody else may write to either.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from cudnn_autotune.core import file_lock
from cudnn_autotune.store.environment import names_file

_LOCK_TIMEOUT_S = 5.0  # only this user's processes can hold a lock, for milliseconds
_MOST_LINE_BYTES = 4096
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PARTIAL = ".part"


class Entry(NamedTuple):
    """A file of the folder."""

    name: str
    size: int
    mtime_ns: int


class PrivateFolder:
    """A folder below ``parent`` for this user's files. It is created by the first write.

    Each user has a folder of their own, because several may share the one above.
    """

    def __init__(self, parent: Path, name: str) -> None:
        self.path = parent / f"{name}-{os.geteuid()}"

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Returns the content of a file, or None if there is no such file.

        Raises:
            OSError: The file cannot be read, is larger than ``most_bytes``, or could have been
                written by another user.
        """
        try:
            with self._opened() as folder:
                # O_NONBLOCK: opening a named pipe would otherwise wait for its writer.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(name, flags, dir_fd=folder), "rb") as file:
                    status = os.fstat(file.fileno())
                    _check_owner(status, f"{self.path}/{name}")
                    if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
                        raise OSError(
                            f"{self.path}/{name} is no file of at most {most_bytes} bytes"
                        )
                    return file.read(most_bytes)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces a file in one step.

        After a power failure the file may be damaged, which its reader must be able to recognise.

        Raises:
            OSError: The file cannot be written, and is as it was.
        """
        with self._made() as folder:
            partial = f".{name}.{os.getpid()}-{token_hex(4)}{_PARTIAL}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with open(os.open(partial, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(data)
                os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial, dir_fd=folder)
                raise

    def append(self, name: str, line: bytes) -> int:
        """Adds a line to a file, which need not exist, and returns the size of the file.

        A killed writer's half line is cut off. A file that this user does not own is not changed.

        Args:
            line: At most 4096 bytes, with a line feed.

        Raises:
            OSError: The line cannot be written whole. Then no part of it stays, or a part without a
                line feed.
        """
        with self._made() as folder, self._locked(folder, name) as file:
            size = os.fstat(file).st_size
            begin = max(size - _MOST_LINE_BYTES, 0)
            newline = os.pread(file, _MOST_LINE_BYTES, begin).rfind(b"\n")
            end = begin + newline + 1 if newline >= 0 else 0
            try:
                if end < size:
                    os.ftruncate(file, end)
                _write(file, line, end)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(file, end)
                raise
            return end + len(line)

    def rewrite(self, name: str, change: Callable[[bytes], bytes]) -> None:
        """Replaces the content of a file, while nobody can append to it.

        Raises:
            OSError: The file cannot be read or written, and is as it was.
        """
        with self._made() as folder, self._locked(folder, name) as file:
            self.write(name, change(_content(file)))

    def blot_lines(self, name: str, beginnings: Collection[bytes]) -> None:
        """Overwrites these beginnings of lines by dashes, and waits until that is on the disk. This
        needs no free disk space. Does nothing if there is no such file.

        Raises:
            OSError: The file cannot be changed; some of the lines may be.
        """
        with (
            suppress(FileNotFoundError),
            self._opened() as folder,
            self._locked(folder, name, may_create=False) as file,
        ):
            place = 0
            for line in _content(file).split(b"\n"):
                for beginning in beginnings:
                    if line.startswith(beginning):
                        _write(file, b"-" * len(beginning), place)
                place += len(line) + 1
            os.fdatasync(file)

    def mark_used(self, name: str) -> None:
        """Marks a file as the most recently used one, if possible."""
        with suppress(OSError), self._opened() as folder:
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def entries(self) -> list[Entry]:
        """Returns the files, the most recently used first; none if they cannot be listed.

        Killed writers' files are among them.
        """
        found = []
        with suppress(OSError), self._opened() as folder, os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append(Entry(entry.name, status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda entry: entry.mtime_ns, reverse=True)

    def remove(self, name: str) -> bool:
        """Removes a file, and returns whether it was there and is gone."""
        try:
            with self._opened() as folder:
                os.unlink(name, dir_fd=folder)
        except OSError:
            return False
        return True

    def trim(self, most_bytes: int) -> None:
        """Removes the least recently used files until the others fit."""
        left = most_bytes
        for entry in self.entries():
            left -= max(entry.size, 1)  # an empty one is a killed writer's
            if left < 0:
                self.remove(entry.name)

    @contextmanager
    def _locked(self, folder: int, name: str, *, may_create: bool = True) -> Iterator[int]:
        """Opens a file of the open folder and holds its lock, as for each change."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            file = os.open(name, flags | (os.O_CREAT if may_create else 0), 0o600, dir_fd=folder)
            with file_lock.locked(file, _LOCK_TIMEOUT_S):
                status = os.fstat(file)
                _check_owner(status, f"{self.path}/{name}")
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(f"{self.path}/{name} is no file")
                # It may have been replaced while this process waited.
                if _inode(folder, name) == status.st_ino:
                    yield file
                    return

    @contextmanager
    def _made(self) -> Iterator[int]:
        """Opens the folder like :meth:`_opened`, and creates it if it does not exist."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        with self._opened() as folder:
            yield folder

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Opens the folder itself, so that nobody can replace it before it is closed."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.path, flags)
        try:
            _check_owner(os.fstat(folder), str(self.path))
            yield folder
        finally:
            os.close(folder)


def folder_beside(place: Path) -> PrivateFolder:
    """Returns the folder of this user's plans for a store, which is a folder or a file."""
    if names_file(place):
        return PrivateFolder(place.parent, f"{place.stem}.plans")
    return PrivateFolder(place, "plans")


def _inode(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return None


def _content(file: int) -> bytes:
    with open(file, "rb", closefd=False) as reader:
        return reader.read()


def _write(file: int, data: bytes, place: int) -> None:
    """Writes all of the data at a place of a file; the system may take it in parts."""
    while data:
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


def _check_owner(status: os.stat_result, path: str) -> None:
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
        raise PermissionError(
            f"{path} is not used: another user owns it or may write to it "
            f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):03o})"
        )
