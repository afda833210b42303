"""Operations on a file that processes share: reading, and under a lock appending or replacing."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cudnn_autotune.core import atomic_file, file_lock

# A writer holds the lock for milliseconds. Many may wait for it, and the next one is random.
LOCK_TIMEOUT_S = 60.0
_ANY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
MOST_BYTES = 1 << 28
"""The largest file that is read or written: room for more than 100,000 decisions. The limit
protects from sparse files, which may claim any size."""


class Stamp(NamedTuple):
    """Attributes of a file that change when the file is changed or replaced."""

    mtime_ns: int
    size: int
    inode: int
    ctime_ns: int


def stamp(file: Path | int) -> Stamp | None:
    """Returns the stamp of a file or a descriptor, or None if there is no file.

    Raises:
        OSError: The file cannot be examined.
    """
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO | None]:
    """Opens a file for reading; yields None if it does not exist.

    Raises:
        OSError: The file exists, but cannot be read, is no regular file, or is larger than
            ``MOST_BYTES``.
    """
    try:
        # O_NONBLOCK: opening a named pipe would otherwise wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        _check_size(status.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes | None:
    """Returns the whole file, or None if it does not exist. It raises as ``opened``."""
    with opened(path) as file:
        return None if file is None else file.read()


def check_not_link(path: Path) -> None:
    """Raises PermissionError for a link. No write goes through one: a store has followed the links
    that it may (``atomic_file.followed``)."""
    if os.path.islink(path):
        raise PermissionError(errno.EACCES, "a link is not followed", str(path))


def append(path: Path, data: bytes, end: int, known: Stamp | None) -> Stamp | None:
    """Replaces everything behind the first ``end`` bytes of a file by ``data``, and returns the
    file's stamp once the data is on the disk. The caller must hold the lock.

    Args:
        known: The stamp of the file as it was read.

    Raises:
        PermissionError: The file is read-only, or its permissions do not allow it.
        OSError: The data could not be written, or the file is no longer the known one. The first
            ``end`` bytes are unchanged; bytes behind them may be lost.
    """
    if atomic_file.is_read_only(path):
        raise PermissionError(errno.EACCES, "the file is read-only", str(path))
    _check_size(end + len(data))
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    try:
        if stamp(descriptor) != known:
            raise OSError(errno.ESTALE, "the file has changed since it was read", str(path))
        os.ftruncate(descriptor, end)
        try:
            if os.pwrite(descriptor, data, end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fdatasync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, end)
            raise
        return stamp(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Holds the lock file ``<path>.lock`` against other processes and threads, and creates its
    folder. The lock of a process that dies is released.

    Raises:
        TimeoutError: The lock was not released within ``timeout_s`` (None: ``LOCK_TIMEOUT_S``).
        OSError: The lock file cannot be created or locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _opened_lock(f"{path}.lock")
    with file_lock.locked(descriptor, LOCK_TIMEOUT_S if timeout_s is None else timeout_s):
        yield


def _opened_lock(path: str) -> int:
    """Opens a lock file. Only users who may write can open it.

    A user who can open a file can hold its lock, and so keep others from writing. The umask decides
    who may write, as with the store's file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, _ANY_WRITES)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    writers = status.st_mode & _ANY_WRITES
    mode = writers | writers << 1
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
        with suppress(OSError):
            os.fchmod(descriptor, mode)
    return descriptor


def replace(path: Path, data: bytes) -> Stamp | None:
    """Replaces the file atomically, and returns its stamp. The caller must hold the lock.

    Raises:
        OSError: The file cannot be written, or ``data`` exceeds ``MOST_BYTES`` and so could not be
            read again.
    """
    _check_size(len(data))
    atomic_file.write(path, data)
    return stamp(path)


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise OSError(
            errno.EFBIG, f"a store's file has at most {MOST_BYTES} bytes, this one has {size}"
        )


def is_writable(path: Path) -> bool:
    """Returns whether the permissions of the file and its folder allow a change."""
    if atomic_file.is_read_only(path) or os.path.islink(path):
        return False
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return False
    folder = next(folder for folder in path.parents if os.path.exists(folder))
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def set_aside(path: Path) -> Path:
    """Keeps the present file under a second name, ``<path>.damaged-<UTC time>``, and returns it.

    Raises:
        OSError: The file can be neither linked nor copied.
    """
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1000):
        aside = path.with_name(f"{path.name}.damaged-{now}" + (f"-{number}" if number else ""))
        try:
            os.link(path, aside)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            data = path.read_bytes()
            with suppress(FileExistsError), open(aside, "xb") as file:
                file.write(data)
                return aside
            continue
        return aside
    raise FileExistsError(str(aside))
