"""The memory of verdicts on disk, beside the decisions.

A verdict is a measurement of norms in eager mode, of groups, families and programs of compiled
graphs, or of layouts of models. All follow one protocol, :func:`kept_or_measured`. An entry that an
earlier process has kept serves if it still holds. Else the candidates are measured, and the result
is kept if it is final. The protocol's halves for separate calls are :func:`find_kept` and
:func:`keep`. The name of an entry has all its conditions beside the environment.

The entries lie in a file with the format, lock and guarantees of the decisions' (``journal``). An
entry is plain JSON, which its reader checks.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from cudnn_autotune.core import atomic_file, json_dataclass
from cudnn_autotune.core.fork_safe_lock import LOCK
from cudnn_autotune.engines import registry
from cudnn_autotune.store import codec, settings
from cudnn_autotune.store.environment import VERDICTS_SUFFIX, Environment
from cudnn_autotune.store.file_store import Layered, Store
from cudnn_autotune.store.journal import Changes, Journal
from cudnn_autotune.store.notices import WarningsPutOff

_log = logging.getLogger(__name__)
T = TypeVar("T")


def path_of(file: Path) -> Path:
    """Returns the path of the file beside a store's file."""
    return file.with_suffix(VERDICTS_SUFFIX)


class LockedError(Exception):
    """The error of a measurement that a locked store forbids."""


class VerdictFile:
    """The file beside a store's file, which need not exist.

    Threads and processes may share it. Entries that cannot be written are lost with the process,
    and a warning says so once.

    Args:
        store: the store.
        read_only: whether entries are not written.
    """

    def __init__(self, store: Store, read_only: bool) -> None:
        path = path_of(store.path)
        with suppress(OSError):  # a link that is not followed is only read
            path = atomic_file.followed(path)
        self._environment = store.environment
        self._file = Journal(path, store.environment, read_only)

    @property
    def obstacle(self) -> str:
        """The reason why the last entries are not on the disk; empty if they are."""
        return self._file.obstacle

    def find(self, name: str) -> Any:
        """Returns the JSON of the entry of a name, or None if there is none."""
        quoted = _quoted(name)
        with WarningsPutOff(), LOCK:
            line = self._file.content.entries.get(quoted)
            if line is None and self._file.refresh():
                line = self._file.content.entries.get(quoted)
        if line is None:
            return None
        try:
            return json.loads(line)["decision"]
        except (ValueError, RecursionError):  # half of a surrogate pair, or nested too deeply
            return None

    def put(self, name: str, tree: Any) -> None:
        """Adds an entry, or replaces the one of its name."""
        changes: Changes = {_quoted(name): line_of(name, tree, self._environment)}
        self._change(lambda entries: changes)

    def add(self, lines: Mapping[bytes, bytes]) -> int | None:
        """Adds the entries that the file does not have, and returns their number; None if the file
        cannot be written.

        Args:
            lines: name to line, as in ``file_format.Content``, of the store's environment.
        """
        missing: dict[bytes, bytes] = {}

        def changes_of(entries: Mapping[bytes, bytes]) -> Changes:
            missing.update((name, lines[name]) for name in lines.keys() - entries.keys())
            return missing

        return len(missing) if self._change(changes_of) else None

    def _change(self, changes_of: Callable[[Mapping[bytes, bytes]], Changes]) -> bool:
        """Changes the file as ``Journal.update``; returns whether the changes are on the disk."""
        with WarningsPutOff():
            with LOCK:
                is_left_alone = self._file.is_left_alone()
            if is_left_alone:
                return False
            with self._file.locked() as failure, LOCK:
                return self._file.update(changes_of, failure)


def line_of(name: str, tree: Any, environment: Environment) -> bytes:
    """Returns the line of an entry in a file; ``tree`` is its JSON."""
    value = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
    return codec.sealed(_quoted(name), value, environment)


_on_entry: list[Callable[[int | None, str, Any], object]] = []


def on_entry(callback: Callable[[int | None, str, Any], object]) -> None:
    """Calls ``callback(device, name, tree)`` for each entry that is found or measured from now on,
    with its JSON."""
    _on_entry.append(callback)


_of_layers: WeakKeyDictionary[Layered, tuple[VerdictFile, ...]] = WeakKeyDictionary()


def find(device: int | None, name: str) -> Any:
    """Returns the JSON of a name's first entry beside the user's store and the shipped ones. None
    if there is none, or the store's mode forbids to read it.

    Args:
        device: the index of a CUDA device; None stands for the current one.
    """
    if not settings.is_read():
        return None
    every = (file.find(name) for file in _files(device))
    found = next((tree for tree in every if tree is not None), None)
    if found is not None:
        _announce(device, name, found)
    return found


def name_of(kind: str, rule: int, *facts: str) -> str:
    """Returns the name of an entry, with its conditions: the facts, the release of torch and the
    implementations of convolutions.

    Args:
        kind: the kind of the raced things.
        rule: the version of their rule of measurement.
    """
    versions = sorted(f"{one.name}@{one.version}" for one in registry.registered())
    depends_on = "\n".join([*facts, torch.__version__, *versions])
    return f"{kind} {hashlib.sha256(depends_on.encode()).hexdigest()} rule={rule}"


def find_kept(device: int | None, name: str, kind: type[T]) -> T | None:
    """Returns the entry of a name as a dataclass; None if no readable one is there.

    Args:
        device, name: as of :func:`find`.
        kind: the dataclass.
    """
    tree = find(device, name)
    try:
        return None if tree is None else json_dataclass.decode(kind, tree, "entry")
    except ValueError as error:
        _log.info("%s: the entry in the store does not serve: %s", name, error)
        return None


def kept_or_measured(
    device: int | None,
    name: str,
    kind: type[T],
    measured: Callable[[], T],
    holds: Callable[[T], bool] = lambda _: True,
    is_final: Callable[[T], bool] = lambda _: True,
) -> tuple[T, bool]:
    """Returns the entry that an earlier process has kept, if it holds; else measures and keeps one,
    unless the store is locked.

    Args:
        device: the index of a CUDA device; None stands for the current one.
        name: the entry's name, with the version of its rule of measurement.
        kind: the dataclass of the entry.
        measured: measures an entry.
        holds: returns whether an entry of the file may still serve.
        is_final: returns whether a measured entry is kept.

    Returns:
        The entry, and whether an earlier process has kept it.

    Raises:
        LockedError: the store is locked, and has no entry that holds.
    """
    found = find_kept(device, name, kind)
    if found is not None and holds(found):
        return found, True
    if settings.is_locked():
        raise LockedError(name)
    found = measured()
    if is_final(found):
        keep(device, name, found)
    return found, False


def keep(device: int | None, name: str, entry: Any) -> None:
    """Writes an entry, a dataclass or plain JSON, beside the user's store, if the store's mode
    allows it."""
    tree = json_dataclass.encode(entry)
    if settings.is_written():
        _files(device)[0].put(name, tree)
    _announce(device, name, tree)


def _announce(device: int | None, name: str, tree: Any) -> None:
    for callback in _on_entry:
        callback(device, name, tree)


def _files(device: int | None) -> tuple[VerdictFile, ...]:
    layers = settings.layers(device)
    with LOCK:
        if layers not in _of_layers:
            user = VerdictFile(layers.user, not settings.is_written())
            shipped = (VerdictFile(store, read_only=True) for store in layers.shipped)
            _of_layers[layers] = (user, *shipped)
        return _of_layers[layers]


def _quoted(name: str) -> bytes:
    return json.dumps(name).encode()
