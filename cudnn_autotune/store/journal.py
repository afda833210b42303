"""A store's file as this process last saw it, and changes to it: lines that are appended, and a new
file once most lines no longer count. Whatever is wrong with the file is said once, and raises
nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from filelock import Timeout

from cudnn_autotune.store import disk_file, entry, file_format
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_format import Content, State
from cudnn_autotune.store.notices import warn_once

Changes = Mapping[bytes, bytes | None]
"""Name of an entry -> its new line; None: it goes."""

_log = logging.getLogger(__name__)

# Files that are left alone.
_BLOCKED = (State.FOREIGN, State.NO_STORE, State.NEWER, State.UNREADABLE)
_RETRY_TIMEOUT_S = 0.5
_IN_MEMORY = "new decisions stay in the memory of this process"
_FEW_LINES = 64
"""So many lines that no longer count are worth no new file."""


class Journal:
    """Not for several threads at once, but for :meth:`locked`.

    Args:
        read_only: the file is read, and otherwise left alone.
    """

    def __init__(self, path: Path, environment: Environment, read_only: bool) -> None:
        self.path = path
        self.content = Content(State.ABSENT)
        self._environment = environment
        self._read_only = read_only
        self._stamp: disk_file.Stamp | None = None
        self._has_failed = False
        self._has_written = False

    @property
    def is_writable(self) -> bool:
        """Whether the next change will get there, as far as is known."""
        if self._read_only or self._has_failed or self.content.state in _BLOCKED:
            return False
        return disk_file.is_writable(self.path)

    def refresh(self) -> bool:
        """Looks whether the file changed, and reads it if so; whether it did."""
        try:
            stamp = disk_file.stamp(self.path)
        except OSError:
            stamp = None  # reading it tells why
        if stamp == self._stamp and self.content.state is not State.UNREADABLE:
            return False
        self._read()
        if self.content.state is State.DAMAGED and not self.is_left_alone():
            # Where others hold the lock this is left to the next change: a lookup waits for nobody.
            with _held(self.path, 0) as failure:
                if not isinstance(failure, Timeout):
                    self.update(lambda entries: {}, failure)
        self._tell_blocked()
        return True

    def is_left_alone(self) -> bool:
        """Whether nothing may be written, not even a lock beside it; then it says why."""
        if self._read_only:
            self._tell_damaged("it is left as it is", self.content, self._stamp)
            return True
        if self.content.state in _BLOCKED:
            self._read()
            self._tell_blocked()
        return self.content.state in _BLOCKED

    @contextmanager
    def locked(self) -> Iterator[OSError | None]:
        """Waits for the lock of a file that is not left alone, and holds it: for :meth:`update`.

        A process that hangs may have it for long. So this, and this only, may be called while
        another thread is within another method.

        Yields:
            Why it cannot be had.
        """
        # Whoever has waited once for a process that hangs does not do so at every change.
        with _held(self.path, _RETRY_TIMEOUT_S if self._has_failed else None) as failure:
            yield failure

    def update(
        self, changes_of: Callable[[Mapping[bytes, bytes]], Changes], failure: OSError | None
    ) -> bool:
        """Changes the file, under its lock; when this returns True, the changes are on the disk,
        and what is damaged is set aside.

        Args:
            changes_of: is called with the entries of the file while no other process can write.
            failure: why the lock could not be had.
        """
        try:
            if failure is not None:
                raise failure
            self._read()
            if self.content.state in _BLOCKED:
                self._tell_blocked()
                return False
            changes = changes_of(self.content.entries)
            if changes or self.content.state is State.DAMAGED:
                self._write(changes)
        except OSError as error:
            self._has_failed = True
            if self.content.state is State.DAMAGED:
                done = f"it cannot be set aside ({error}), {_IN_MEMORY}"
                self._tell_damaged(done, self.content, self._stamp)
            else:
                warn_once(
                    (self.path, "unwritable"),
                    f"{self.path} cannot be written, {_IN_MEMORY}: {error}",
                )
            return False
        self._has_failed = False
        return True

    def _read(self) -> None:
        """Only what is new where the file is the one that is known, and has grown."""
        before = self.content
        try:
            with disk_file.opened(self.path) as file:
                if file is None:
                    self.content, self._stamp = Content(State.ABSENT), None
                    return
                if file.stamp == self._stamp and before.state is not State.UNREADABLE:
                    return
                is_longer = _is_continued(before, file)
                if not is_longer or before.extend(file.read(before.end), self._environment):
                    self.content = file_format.decode(file.read(), self._environment)
                self._stamp = file.stamp
        except OSError as error:
            # What was read before is still served.
            why = str(error)
            if (before.state, before.why) != (State.UNREADABLE, why):
                self.content = replace(before, state=State.UNREADABLE, why=why)
            self._stamp = None

    def _write(self, changes: Changes) -> None:
        """To be called under the lock, on what was read under it."""
        if not self._has_written:
            disk_file.remove_partials(self.path)
            self._has_written = True
        content = self.content
        dead = content.lines + len(changes) - len(content.entries)
        is_worn = dead > max(len(content.entries), _FEW_LINES)
        if content.state is not State.SOUND or not content.head or is_worn:
            self._write_anew(changes)
            return
        lines = [
            entry.removal(name, self._environment) if line is None else line
            for name, line in changes.items()
        ]
        data = b"".join(line + b"\n" for line in lines)
        if content.is_tail_whole:
            self._stamp = disk_file.append(self.path, b"\n" + data, content.end + len(content.tail))
        else:
            self._stamp = disk_file.append(self.path, data, content.end)
        content.extend(
            content.tail + b"\n" + data if content.is_tail_whole else data, self._environment
        )

    def _write_anew(self, changes: Changes) -> None:
        content, environment = self.content, self._environment
        merged = {**content.entries, **changes}
        lines = []
        for line in merged.values():
            if line is not None:
                with suppress(ValueError):  # of version 1, and never served
                    lines.append(entry.of_this_version(line, environment))
        gone = sum(line is None for line in merged.values())
        if content.state is State.SOUND and len(lines) + gone < len(merged):
            content.state, content.why = State.DAMAGED, "some of its entries are no decisions"
        aside = disk_file.set_aside(self.path) if content.state is State.DAMAGED else None
        before = self._stamp
        data = file_format.encode(environment, lines, token_hex(4))
        try:
            self._stamp = disk_file.replace(self.path, data)
        except BaseException:
            # Unless the file has been replaced by then: it is the only one that is left.
            with suppress(OSError):
                now = disk_file.stamp(self.path)
                if aside and now and before and now.inode == before.inode:
                    aside.unlink()
            raise
        self.content = file_format.decode(data, environment)
        if aside is not None:
            self._tell_damaged(f"set aside as {aside.name}", content, before)

    def _tell_damaged(self, done: str, content: Content, stamp: disk_file.Stamp | None) -> None:
        if content.state is State.DAMAGED:
            warn_once(
                # Setting it aside has changed its ctime.
                (self.path, "damaged", stamp and stamp[:3]),
                f"{self.path} is damaged ({content.why}); {done}; decisions in it that are intact "
                f"and served: {len(content.entries)}",
            )

    def _tell_blocked(self) -> None:
        state, why = self.content.state, self.content.why
        if state not in _BLOCKED:
            return
        if self._read_only and state is State.FOREIGN:
            # As it should be where an application ships a file for each GPU.
            _log.info("%s is not asked: %s", self.path, why)
            return
        done = "is not asked" if self._read_only else f"is left alone, {_IN_MEMORY}"
        warn_once((self.path, state), f"{self.path} {done}: {why}")


def _is_continued(known: Content, file: disk_file.OpenFile) -> bool:
    """Whether a file begins with what is known, whose header has an identity of its own."""
    last = known.end - len(known.last)
    return (
        known.state is State.SOUND
        and bool(known.head)
        and file.read(0, len(known.head)) == known.head
        and file.read(last, len(known.last)) == known.last
    )


@contextmanager
def _held(path: Path, timeout_s: float | None) -> Iterator[OSError | None]:
    """As ``disk_file.locked``, but yields the error that it raises."""
    with ExitStack() as stack:
        failure = None
        try:
            stack.enter_context(disk_file.locked(path, timeout_s))
        except OSError as error:
            failure = error
        yield failure
