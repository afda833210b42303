"""Decisions on disk, shared by processes: what one has tuned, the next one knows."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from cudnn_autotune.core.json_node import shown
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.store import entry
from cudnn_autotune.store.content import Content
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.folder import file_in
from cudnn_autotune.store.lookup import Lookup
from cudnn_autotune.store.notices import warn_once
from cudnn_autotune.store.pending import Pending
from cudnn_autotune.store.precedence import measured_at
from cudnn_autotune.store.process_lock import LOCK
from cudnn_autotune.store.provenance import Provenance
from cudnn_autotune.store.synced_file import SyncedFile

_log = logging.getLogger(__name__)


class Store(Lookup):
    """The decisions of one environment, in one file.

    Threads and processes may share it. Every change is on the disk when the call returns, and loses
    nothing of what others wrote meanwhile. What cannot be written (a full disk, a folder without
    permission, a file that is read-only, of a newer version, or no store's) stays in memory, is
    served from there, is said once, and is tried again with the next change. A file that is damaged
    is set aside; what is intact in it is kept.

    Args:
        path: a file (``*.json``), or a folder with a file for each environment; None: the folder
            ``CUDNN_AUTOTUNE_CACHE_DIR``, else ``$XDG_CACHE_HOME/cudnn_autotune``, else
            ``~/.cache/cudnn_autotune``.
        environment: whose decisions; None: that of the current CUDA device.
        read_only: leaves the disk alone: changes stay in memory.

    Raises:
        TypeError: a path, or an environment, that is none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        environment: Environment | None = None,
        *,
        read_only: bool = False,
    ) -> None:
        if not isinstance(environment, Environment | None):
            raise TypeError(f"environment must be an Environment, got {shown(environment)}")
        self.environment = Environment.of() if environment is None else environment
        place = Path(os.path.realpath(file_in(path, self.environment)))
        self._file = SyncedFile(place, self.environment, read_only)
        # Name of an entry -> what of it is not on the disk yet; None: that it is gone.
        self._unwritten: dict[bytes, bytes | None] = {}
        self._parsed: dict[bytes, Decision | None] = {}
        self._is_suspect = False
        with LOCK:
            self._file.refresh()

    @property
    def path(self) -> Path:
        """The file; it need not exist."""
        return self._file.path

    @property
    def is_writable(self) -> bool:
        """Whether what is put in will outlive this process, as far as is known."""
        return self._file.is_writable

    def by_key(self, key: str) -> Decision | None:
        """What stands under a ``Decision.key``, as it was measured. TypeError where it is none."""
        if not isinstance(key, str):
            raise TypeError(f"key must be a text, got {shown(key)}")
        return self._looked_up(lambda: next(iter(self._known(key)), None))

    def put(
        self,
        problem: ConvProblem,
        selection: Selection,
        *,
        sampling: str = "auto",
        workspace_limit: int | None = None,
        benchmark_limit: int = 0,
        relative_error: float | None = None,
        rejected: Iterable[tuple[str, float]] = (),
    ) -> None:
        """Keeps what was measured just now; the arguments are those of ``Decision``, and so are
        the errors."""
        decision = Decision(
            problem=problem,
            sampling=sampling,
            benchmark_limit=benchmark_limit,
            workspace_limit=workspace_limit,
            selection=selection,
            relative_error=relative_error,
            rejected=rejected,  # type: ignore[arg-type]  # Decision makes a tuple of it
            provenance=Provenance.now(),
        )
        self.add([decision], are_latest=True)

    def add(self, decisions: Iterable[Decision], *, are_latest: bool = False) -> None:
        """Keeps many in one step: all of them are on the disk afterwards, or none. Of two for a
        problem under equal constraints the later one is kept.

        Args:
            are_latest: they were measured just now, and replace what is there under equal
                constraints even where a clock says otherwise.

        Raises:
            ValueError: one that could not be read back, as for a negative time; none is kept then.
            TypeError: no decisions.
        """
        decisions = _checked(decisions)
        lines = [entry.encode(decision, self.environment) for decision in decisions]
        given = [entry.decode(line, self.environment) for line in lines]
        self._change(given, are_latest=are_latest)

    def merge(self, other: Store) -> int:
        """Takes over what ``other`` knows; returns how many were new, newer, or of looser
        constraints. ValueError where it is of another environment; TypeError where it is no
        Store."""
        if not isinstance(other, Store):
            raise TypeError(f"other must be a Store, got {shown(other)}")
        if other.environment != self.environment:
            raise ValueError(
                f"other must be a store of {self.environment.file_name}, got one of "
                f"{other.environment.file_name}"
            )
        return self._change(list(other))

    def discard(self, decisions: Iterable[Decision]) -> int:
        """Forgets these, each only where it stands there still and nothing that was measured
        meanwhile; returns how many did. TypeError where they are no decisions."""
        gone = {entry.name_of(decision): decision for decision in _checked(decisions)}
        return self._change([], gone) if gone else 0

    def reject(self, answer: Decision) -> None:
        """Notes that the chosen one of what :meth:`find` has answered cannot serve: it no longer
        builds, or its output is wrong. The next best of the same measurement takes its place."""
        if not isinstance(answer, Decision):
            raise TypeError(f"answer must be a Decision, got {shown(answer)}")
        constraints = (answer.problem.deterministic, answer.workspace_limit)
        failed = (answer.selection.winner.candidate.text, math.inf)
        with LOCK:
            known = [d for d in self._known(answer.key) if d.restricted_to(*constraints) == answer]
        if known:
            rejected = [replace(d, rejected=(*d.rejected, failed)) for d in known]
            self._change(rejected, {entry.name_of(d): d for d in known})

    def keys(self) -> Iterator[str]:
        """The ``Decision.key`` of each entry, once; none of them is parsed."""
        return iter(dict.fromkeys(entry.key_of(name) for name in self._names()))

    def __iter__(self) -> Iterator[Decision]:
        for name in self._names():
            with LOCK:
                line = self._line(name)
                decision = None if line is None else self._decoded(line)
                self._check()
            if decision is not None:
                yield decision

    def __len__(self) -> int:
        return len(self._names())

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.by_key(key) is not None

    def _find(self, key: str, deterministic: bool, workspace_limit: int | None) -> Decision | None:
        def known() -> Decision | None:
            fitting = [d.restricted_to(deterministic, workspace_limit) for d in self._known(key)]
            return max(filter(None, fitting), key=measured_at, default=None)

        return self._looked_up(known)

    def _refresh(self) -> bool:
        changed = self._file.refresh()
        if changed:
            self._parsed.clear()
        return changed

    def _check(self) -> None:
        """To be called once an entry may have been parsed."""
        if self._is_suspect:
            self._is_suspect = False
            self._file.check()
            self._parsed.clear()

    def _looked_up(self, look: Callable[[], Decision | None]) -> Decision | None:
        with LOCK:
            found = look()
            if found is None and self._refresh():
                found = look()
            self._check()
            return found

    def _names(self) -> list[bytes]:
        with LOCK:
            self._refresh()
            names = dict.fromkeys([*self._file.content.spans, *self._unwritten])
            return [name for name in names if self._unwritten.get(name, b"") is not None]

    def _line(self, name: bytes) -> bytes | None:
        if name in self._unwritten:
            return self._unwritten[name]
        return self._file.content.line(name)

    def _known(self, key: str) -> list[Decision]:
        found = []
        for name in entry.names(key):
            if name not in self._parsed:
                line = self._line(name)
                self._parsed[name] = None if line is None else self._decoded(line)
            decision = self._parsed[name]
            if decision is not None:
                found.append(decision)
        return found

    def _decoded(self, line: bytes) -> Decision | None:
        try:
            return self._decoded_if_whole(line)
        except entry.NoEntryError:
            self._is_suspect = True
            return None

    def _decoded_if_whole(self, line: bytes) -> Decision | None:
        try:
            return entry.decode(line, self.environment)
        except entry.NoEntryError:
            raise
        except ValueError as error:
            message = f"{self.path}: an entry is not served: {error} ({line[:200]!r})"
            _log.debug(message)
            warn_once((self.path, "entry"), message)
            return None

    def _change(
        self,
        given: Collection[Decision],
        gone: Mapping[bytes, Decision] | None = None,
        *,
        are_latest: bool = False,
    ) -> int:
        """Returns how many of ``given`` were taken in, or of ``gone`` have gone. Lookups go on
        while it waits for the file's lock."""
        taken = 0

        def settled(
            content: Content, decode: Callable[[bytes], Decision | None]
        ) -> dict[bytes, bytes | None]:
            nonlocal taken
            pending = Pending(self._unwritten, given, gone or {}, are_latest)
            changes, taken = pending.settled(content, self.environment, decode)
            return changes

        with LOCK:
            is_left_alone = self._file.is_left_alone()
        with nullcontext() if is_left_alone else self._file.locked() as failure, LOCK:
            if not is_left_alone and self._file.update(
                lambda content: settled(content, self._decoded_if_whole), failure
            ):
                self._unwritten = {}
            else:
                self._unwritten = settled(self._file.content, self._decoded)
            self._parsed.clear()
        with LOCK:
            self._check()
        return taken


def _checked(decisions: Iterable[Decision]) -> list[Decision]:
    if not isinstance(decisions, Iterable):
        raise TypeError(f"decisions must be an iterable of Decision, got {shown(decisions)}")
    found = list(decisions)
    for one in found:
        if not isinstance(one, Decision):
            raise TypeError(f"decisions must hold nothing but Decision, got {shown(one)}")
    return found
