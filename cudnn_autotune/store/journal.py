"""Reads and changes of a store's file, which is a journal: a change appends lines. Once most lines
are out of date, the live ones are written to a new file.

Any fault of the file causes one warning and no exception.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from cudnn_autotune.core import atomic_file
from cudnn_autotune.store import codec, disk_file, file_format
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_format import Content, State
from cudnn_autotune.store.notices import warn_once

Changes = Mapping[bytes, bytes | None]
"""Entry name to its new line, or to None if the entry is removed."""

_log = logging.getLogger(__name__)

# Files in these states are never changed.
_BLOCKED = (State.FOREIGN, State.NO_STORE, State.OTHER_VERSION, State.UNREADABLE)
_RETRY_TIMEOUT_S = 0.5
_IN_MEMORY = "new decisions stay in the memory of this process"
_FEW_LINES = 64
"""A file with at most this many lines out of date is not rewritten."""


class Journal:
    """A store's file, which need not exist, with the content that this process last read.

    Only one thread may use it at a time, except for :meth:`locked`.
    """

    def __init__(self, path: Path, environment: Environment, read_only: bool) -> None:
        self.path = path
        self.content = Content(State.ABSENT)
        self._environment = environment
        self._read_only = read_only
        self._stamp: disk_file.Stamp | None = None
        self._failure = ""
        self._has_written = False

    @property
    def is_writable(self) -> bool:
        """Whether the next change can be written to the file, as far as this process knows."""
        if self._read_only or self.obstacle:
            return False
        return disk_file.is_writable(self.path)

    @property
    def obstacle(self) -> str:
        """The reason why the last change is not on the disk; empty if it is."""
        return self._failure or (self.content.why if self.content.state in _BLOCKED else "")

    def refresh(self) -> bool:
        """Reads the file if it has changed, and returns whether it had."""
        try:
            stamp = disk_file.stamp(self.path)
        except OSError:
            stamp = None  # _read finds the same error and records it
        if stamp == self._stamp and self.content.state is not State.UNREADABLE:
            return False
        self._read()
        if self.content.state is State.DAMAGED and not self.is_left_alone():
            # The file is repaired now unless another process holds its lock. A lookup never waits
            # for a lock, so then the next change repairs it.
            with _held(self.path, 0) as failure:
                if not isinstance(failure, TimeoutError):
                    self.update(lambda entries: {}, failure)
        self._warn_blocked()
        return True

    def is_left_alone(self) -> bool:
        """Returns whether the file and its lock file must not be written, and if so warns why."""
        if self._read_only:
            self._warn_damaged("it is left as it is", self.content, self._stamp)
            return True
        if self.content.state in _BLOCKED:
            self._read()
            self._warn_blocked()
        return self.content.state in _BLOCKED

    def locked(self) -> AbstractContextManager[OSError | None]:
        """Waits for the file's lock and holds it, for a call of :meth:`update`; not to be called if
        :meth:`is_left_alone`. The context's value is the error of a lock that is not held, or None.

        A hanging process may hold the lock for long, so other threads may use the other methods.
        """
        # After a time-out, the process waits less at its next changes.
        return _held(self.path, _RETRY_TIMEOUT_S if self._failure else None)

    def update(
        self, changes_of: Callable[[Mapping[bytes, bytes]], Changes], failure: OSError | None
    ) -> bool:
        """Changes the file, whose lock is held, and sets a damaged file aside.

        Args:
            changes_of: Returns the changes for the entries that the file has now.
            failure: The value of :meth:`locked`.

        Returns:
            Whether the changes are on the disk; if not, a warning has given the reason.
        """
        try:
            if failure is not None:
                raise failure
            self._read()
            if self.content.state in _BLOCKED:
                self._warn_blocked()
                return False
            changes = changes_of(self.content.entries)
            if changes or self.content.state is State.DAMAGED:
                self._write(changes)
        except OSError as error:
            self._failure = error.strerror or str(error)
            if error.filename not in (None, str(self.path)):
                self._failure = f"{error.filename}: {self._failure}"
            if self.content.state is State.DAMAGED:
                done = f"it cannot be set aside ({error}), {_IN_MEMORY}"
                self._warn_damaged(done, self.content, self._stamp)
            else:
                warn_once(
                    (self.path, "unwritable"),
                    f"{self.path} cannot be written, {_IN_MEMORY}: {error}",
                )
            return False
        self._failure = ""
        return True

    def _read(self) -> None:
        """Reads the file, or only its new lines if it is the known file and has grown."""
        before = self.content
        try:
            with disk_file.opened(self.path) as file:
                if file is None:
                    self.content, self._stamp = Content(State.ABSENT), None
                    return
                stamp = disk_file.stamp(file.fileno())
                if stamp == self._stamp and before.state is not State.UNREADABLE:
                    return
                is_longer = _is_continued(before, file)
                if not is_longer or before.extend(file.read()):
                    file.seek(0)
                    self.content = file_format.decode(file.read(), self._environment)
                self._stamp = stamp
        except OSError as error:
            # Entries that were read before are kept and served.
            why = str(error)
            if (before.state, before.why) != (State.UNREADABLE, why):
                self.content = replace(before, state=State.UNREADABLE, why=why)
            self._stamp = None

    def _write(self, changes: Changes) -> None:
        """Writes changes to the file that :meth:`_read` has read. The caller holds the lock."""
        disk_file.check_not_link(self.path)
        if not self._has_written:
            atomic_file.remove_partials(self.path)
            self._has_written = True
        content = self.content
        dead = content.lines + len(changes) - len(content.entries)
        is_worn = dead > max(len(content.entries), _FEW_LINES)
        if content.state is not State.SOUND or not content.head or is_worn:
            self._rewrite(changes)
            return
        lines = [
            codec.removal(name, self._environment) if line is None else line
            for name, line in changes.items()
        ]
        data = b"".join(line + b"\n" for line in lines)
        if content.is_tail_whole:
            end = content.end + len(content.tail)
            self._stamp = disk_file.append(self.path, b"\n" + data, end, self._stamp)
        else:
            self._stamp = disk_file.append(self.path, data, content.end, self._stamp)
        content.extend(content.tail + b"\n" + data if content.is_tail_whole else data)

    def _rewrite(self, changes: Changes) -> None:
        content, environment = self.content, self._environment
        lines = [line for line in {**content.entries, **changes}.values() if line is not None]
        aside = disk_file.set_aside(self.path) if content.state is State.DAMAGED else None
        before = self._stamp
        data = file_format.encode(environment, lines, token_hex(4))
        try:
            self._stamp = disk_file.replace(self.path, data)
        except BaseException:
            # The second name is removed, unless the file was replaced: then it is the only copy.
            with suppress(OSError):
                now = disk_file.stamp(self.path)
                if aside and now and before and now.inode == before.inode:
                    aside.unlink()
            raise
        self.content = file_format.decode(data, environment)
        if aside is not None:
            self._warn_damaged(f"set aside as {aside.name}", content, before)

    def _warn_damaged(self, done: str, content: Content, stamp: disk_file.Stamp | None) -> None:
        if content.state is State.DAMAGED:
            warn_once(
                # The ctime is left out, because setting the file aside changes it.
                (self.path, "damaged", stamp and stamp[:3]),
                f"{self.path} is damaged ({content.why}); {done}; decisions in it that are intact "
                f"and served: {len(content.entries)}",
            )

    def _warn_blocked(self) -> None:
        state, why = self.content.state, self.content.why
        if state not in _BLOCKED:
            return
        if self._read_only and state is State.FOREIGN:
            # This is expected if an application ships a file for each kind of GPU.
            _log.info("%s is not asked: %s", self.path, why)
            return
        done = "is not asked" if self._read_only else f"is left alone, {_IN_MEMORY}"
        warn_once((self.path, state), f"{self.path} {done}: {why}")


def _is_continued(known: Content, file: BinaryIO) -> bool:
    """Returns whether the file begins with the known content, and positions it behind that.

    It compares the header, which identifies the file, and the last known line.
    """
    if known.state is not State.SOUND or not known.head:
        return False
    if file.read(len(known.head)) != known.head:
        return False
    file.seek(known.end - len(known.last))
    return file.read(len(known.last)) == known.last


@contextmanager
def _held(path: Path, timeout_s: float | None) -> Iterator[OSError | None]:
    """Holds the lock of ``path`` like ``disk_file.locked``, but yields its error."""
    with ExitStack() as stack:
        failure = None
        try:
            stack.enter_context(disk_file.locked(path, timeout_s))
        except OSError as error:
            failure = error
        yield failure
