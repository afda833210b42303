"""Writing a file in one step: who reads it finds the old one or the new one, whole."""

from __future__ import annotations

import errno
import glob
import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex


def write(path: Path, data: bytes) -> None:
    """Replaces the file, or the one that a link leads to; when this returns, it is on the disk.
    (On a file system that syncs no folders, a power failure may bring the old one back.)

    Raises:
        OSError: the file is then as it was. PermissionError: also where it is read-only.
    """
    path = Path(os.path.realpath(path))
    if is_read_only(path):
        raise PermissionError(errno.EACCES, "the file is read-only", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}-{token_hex(4)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        # 0o666: the umask decides, so that a shared folder can be shared.
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
    # The file has been replaced: whoever heard of a failure now would take it for the old one.
    with suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_read_only(path: Path) -> bool:
    """Whether it is a file that nobody may write to, as its mode says (0444): that its folder would
    let it be replaced, and that root may do anything, does not count."""
    try:
        return not os.stat(path).st_mode & 0o222
    except OSError:
        return False


def partials(path: Path) -> list[Path]:
    """What writers that were killed have left beside ``path``."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.*.part"))
