"""Writes of a file in one step: a reader finds the whole old or the whole new content."""

from __future__ import annotations

import errno
import glob
import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

_MOST_LINKS = 40  # the limit of Linux


def followed(path: Path) -> Path:
    """Returns the path of the file that ``path`` leads to, which need not exist.

    A link in the place of a file is followed only if this user or root owns both the link and the
    folder that it lies in. Otherwise somebody who may write to the folder could have any file of
    this user replaced. The folder is taken as it is named.

    Raises:
        PermissionError: it is a link of another user.
        OSError: its target cannot be found out.
    """
    place = Path(os.path.realpath(path.parent), path.name)
    for _ in range(_MOST_LINKS):
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return place
        if not stat.S_ISLNK(status.st_mode):
            return place
        owners = {status.st_uid, os.stat(place.parent).st_uid}
        if not owners <= {os.geteuid(), 0}:
            raise PermissionError(
                errno.EACCES, "a link that another user may have made is not followed", str(path)
            )
        target = place.parent / os.readlink(place)
        place = Path(os.path.realpath(target.parent), target.name)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def write(path: Path, data: bytes) -> None:
    """Replaces the file, or the one that a link leads to, and waits until it is on the disk.

    Links are followed as by :func:`followed`. On a file system that cannot sync folders, a power
    failure may bring the old content back.

    Raises:
        OSError: the file cannot be written, and is as it was. One reason is that it is no regular
            file but a pipe or a device.
        PermissionError: among others, the file is read-only, or a link of another user.
    """
    path = replaceable(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        # The mode 0o666 lets the umask decide on the permissions, so that folders can be shared.
        with open(os.open(partial, flags, 0o666), "wb") as file:
            with suppress(OSError):
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    # The file has been replaced. An error from here on would claim that the old one is still there.
    with suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replaceable(path: Path) -> Path:
    """Returns the path of the file that :func:`write` replaces, which need not exist. Raises
    OSError if that file may not be replaced."""
    place = followed(path)
    check_regular(place)
    if is_read_only(place):
        raise PermissionError(errno.EACCES, "the file is read-only", str(path))
    return place


def check_regular(path: Path) -> None:
    """Raises OSError if the path is there and is no regular file."""
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))


def is_read_only(path: Path) -> bool:
    """Returns whether a file's mode lets nobody write to it (0444).

    It counts as read-only even if its folder allows replacing it, and for root.
    """
    try:
        return not os.stat(path).st_mode & 0o222
    except OSError:
        return False


def remove_partials(path: Path) -> None:
    """Removes the partial files that killed writers have left beside ``path``."""
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            partial.unlink()
