"""A store's file as this process last saw it, and changes to it. Whatever is wrong with it is said
once, and raises nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import Timeout

from cudnn_autotune.store import disk_file, file_format
from cudnn_autotune.store.content import Changes, Content, State
from cudnn_autotune.store.entry import NoEntryError
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.notices import warn_once

_log = logging.getLogger(__name__)

# Files that are left alone.
_BLOCKED = (State.FOREIGN, State.NO_STORE, State.NEWER, State.UNREADABLE)
_RETRY_TIMEOUT_S = 0.5
_IN_MEMORY = "new decisions stay in the memory of this process"


class SyncedFile:
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
        before = self.content
        if stamp != self._stamp or before.state is State.UNREADABLE:
            self._read()
            if self.content.state is State.DAMAGED:
                self._set_aside()
            self._tell_blocked()
        return self.content is not before

    def check(self) -> None:
        """Looks through every entry, one of them being no JSON; what is damaged is set aside."""
        self.content = file_format.checked(self.content, self._environment)
        self._set_aside(is_thorough=True)

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
        self,
        changes_of: Callable[[Content], Changes],
        failure: OSError | None,
        *,
        is_thorough: bool = False,
    ) -> bool:
        """Changes the file, under its lock; when this returns True, the changes are on the disk.

        Args:
            changes_of: is called with what the file holds, while no other process can write. It
                may raise NoEntryError; what is damaged is then set aside first.
            failure: why the lock could not be had.
            is_thorough: whether every entry is looked at, for damage.
        """
        try:
            if failure is not None:
                raise failure
            self._read()
            if is_thorough:
                self.content = file_format.checked(self.content, self._environment)
            if self.content.state in _BLOCKED:
                self._tell_blocked()
                return False
            try:
                changes = changes_of(self.content)
            except NoEntryError:
                self.content = file_format.checked(self.content, self._environment)
                changes = changes_of(self.content)
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

    def _set_aside(self, is_thorough: bool = False) -> None:
        """Where the lock is held by others, what is damaged is left to the next change: a lookup
        waits for nobody."""
        if self.is_left_alone():
            return
        with _held(self.path, 0) as failure:
            if not isinstance(failure, Timeout):
                self.update(lambda content: {}, failure, is_thorough=is_thorough)

    def _read(self) -> None:
        before = self.content
        try:
            data, self._stamp = disk_file.read(self.path)
        except OSError as error:
            # What was read before is still served.
            why = str(error)
            if (before.state, before.why) != (State.UNREADABLE, why):
                self.content = replace(before, state=State.UNREADABLE, why=why)
            self._stamp = None
            return
        if self._stamp is None:
            self.content = Content(State.ABSENT)
        elif before.state is not State.SOUND or data != before.data:
            self.content = file_format.decode(data, self._environment, before)

    def _write(self, changes: Changes) -> None:
        """To be called under the lock, on what was read under it."""
        is_damaged = self.content.state is State.DAMAGED
        if not changes and not is_damaged:
            return
        if not self._has_written:
            disk_file.remove_partials(self.path)
            self._has_written = True
        content = file_format.changed(self.content, changes, self._environment)
        aside = disk_file.set_aside(self.path) if is_damaged else None
        try:
            stamp = disk_file.replace(self.path, content.data)
        except BaseException:
            # Unless the file has been replaced by then: it is the only one that is left.
            with suppress(OSError):
                now = disk_file.stamp(self.path)
                if aside and now and self._stamp and now.inode == self._stamp.inode:
                    aside.unlink()
            raise
        before = (self.content, self._stamp)
        self.content, self._stamp = content, stamp
        if aside is not None:
            self._tell_damaged(f"set aside as {aside.name}", *before)

    def _tell_damaged(self, done: str, content: Content, stamp: disk_file.Stamp | None) -> None:
        if content.state is State.DAMAGED:
            warn_once(
                # Setting it aside has changed its ctime.
                (self.path, "damaged", stamp and stamp[:3]),
                f"{self.path} is damaged ({content.why}); {done}; decisions in it that are intact "
                f"and served: {len(content.spans)}",
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
