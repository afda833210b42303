"""A file that processes share: read by anyone, appended to or replaced under a lock beside it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from cudnn_autotune.core import atomic_file

# A writer holds the lock for milliseconds; but many may wait, and who gets it next is chance.
LOCK_TIMEOUT_S = 60.0
_POLL_S = 0.005
MOST_BYTES = 1 << 28
"""Of a file that is read or written: tens of thousands of decisions. A sparse file may claim any
size."""


class Stamp(NamedTuple):
    """Differs where a file does."""

    mtime_ns: int
    size: int
    inode: int
    ctime_ns: int


def stamp(path: Path) -> Stamp | None:
    """Of the file as it is; None where there is none. Raises OSError where that is not known."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _stamp(status)


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns)


class OpenFile:
    """A file that is being read: the same one, even where another takes its place meanwhile."""

    def __init__(self, descriptor: int, stamp: Stamp) -> None:
        self._descriptor = descriptor
        self.stamp = stamp

    def read(self, begin: int = 0, size: int | None = None) -> bytes:
        """Its bytes from ``begin`` on, ``size`` of them if there are so many; None: all that there
        were at the time of ``stamp``."""
        size = self.stamp.size - begin if size is None else size
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, size, begin)):
            parts.append(part)
            begin, size = begin + len(part), size - len(part)
        return b"".join(parts)


@contextmanager
def opened(path: Path) -> Iterator[OpenFile | None]:
    """The file, for reading; None where there is none.

    Raises:
        OSError: it is there, but cannot be read, is no regular file, or is larger than
            ``MOST_BYTES``.
    """
    try:
        # Not to wait for the writer of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        _check_size(status.st_size)
        yield OpenFile(descriptor, _stamp(status))
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes | None:
    """The whole file; None where there is none. Raises as :func:`opened`."""
    with opened(path) as file:
        return None if file is None else file.read()


def append(path: Path, data: bytes, end: int) -> Stamp:
    """Writes ``data`` behind the first ``end`` bytes of a file, in the place of what is there; to
    be called under the lock. When this returns, it is on the disk.

    Raises:
        OSError: what was behind ``end`` may be gone, the rest is as it was. PermissionError: also
            where the file is read-only.
    """
    if atomic_file.is_read_only(path):
        raise PermissionError(errno.EACCES, "the file is read-only", str(path))
    _check_size(end + len(data))
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, end)
        try:
            if os.pwrite(descriptor, data, end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fdatasync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, end)
            raise
        return _stamp(os.fstat(descriptor))
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Holds the lock of ``path``, ``<path>.lock``, against other processes and threads.

    Makes the folder if need be. A process that dies leaves no lock behind.

    Raises:
        OSError: no lock is to be had there; TimeoutError: not in time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
    try:
        lock.acquire(poll_interval=_POLL_S)
    except NotImplementedError as error:  # a file system without locks
        raise OSError(str(error)) from error
    try:
        yield
    finally:
        lock.release()


def replace(path: Path, data: bytes) -> Stamp | None:
    """As ``atomic_file.write``; to be called under the lock. The stamp of what is there then.

    Raises:
        OSError: also for more than ``MOST_BYTES``, which nobody would read again.
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
    """Whether it could be changed, as far as permissions tell."""
    if atomic_file.is_read_only(path) or not (os.access(path, os.W_OK) or not os.path.exists(path)):
        return False
    folder = next(folder for folder in path.parents if os.path.exists(folder))
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


def remove_partials(path: Path) -> None:
    """What writers that were killed have left behind. To be called under the lock."""
    for partial in atomic_file.partials(path):
        with suppress(OSError):
            partial.unlink()


def set_aside(path: Path) -> Path:
    """A second name for the file as it is: ``<path>.damaged-<UTC time>``. Raises OSError."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1000):
        aside = path.with_name(f"{path.name}.damaged-{now}" + (f"-{number}" if number else ""))
        try:
            os.link(path, aside)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            shutil.copy2(path, aside)
        return aside
    raise FileExistsError(str(aside))
