"""The choices for batch norms of eager training, on disk.

They lie in a file beside the decisions, with their format, lock and guarantees (``journal``). An
entry is plain JSON, which whoever asks for it checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from cudnn_autotune.core import atomic_file
from cudnn_autotune.core.fork_safe_lock import LOCK
from cudnn_autotune.store import codec, settings
from cudnn_autotune.store.file_store import Layered, Store
from cudnn_autotune.store.journal import Changes, Journal
from cudnn_autotune.store.notices import WarningsPutOff

# Not that of a store's files, among which it lies.
SUFFIX = ".norms"


def path_of(file: Path) -> Path:
    """Returns the path of the file beside a store's file."""
    return file.with_suffix(SUFFIX)


class NormFile:
    """The file beside a store's file, which need not exist.

    Threads and processes may share it. What cannot be written is lost with the process, and a
    warning says so once.

    Args:
        store: the store.
        read_only: whether nothing is written.
    """

    def __init__(self, store: Store, read_only: bool) -> None:
        path = path_of(store.path)
        with suppress(OSError):  # a link that is not followed is only read
            path = atomic_file.followed(path)
        self._environment = store.environment
        self._file = Journal(path, store.environment, read_only)

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
        value = json.dumps(tree, allow_nan=False, separators=(",", ":")).encode()
        changes: Changes = {_quoted(name): codec.sealed(_quoted(name), value, self._environment)}
        self._change(lambda entries: changes)

    def add(self, lines: Mapping[bytes, bytes]) -> int | None:
        """Adds the entries that the file does not have, and returns how many these were; None if
        the file cannot be written.

        Args:
            lines: name to line, as ``file_format.Content`` has them, of the store's environment.
        """
        missing: dict[bytes, bytes] = {}

        def changes_of(entries: Mapping[bytes, bytes]) -> Changes:
            missing.update((name, lines[name]) for name in lines.keys() - entries.keys())
            return missing

        return len(missing) if self._change(changes_of) else None

    def _change(self, changes_of: Callable[[Mapping[bytes, bytes]], Changes]) -> bool:
        """Changes the file as ``Journal.update`` does; returns whether that is on the disk."""
        with WarningsPutOff():
            with LOCK:
                is_left_alone = self._file.is_left_alone()
            if is_left_alone:
                return False
            with self._file.locked() as failure, LOCK:
                return self._file.update(changes_of, failure)


_of_layers: WeakKeyDictionary[Layered, tuple[NormFile, ...]] = WeakKeyDictionary()


def find(device: int | None, name: str) -> Any:
    """Returns the JSON of the first entry of a name beside the user's store and the shipped ones;
    None if there is none, or the store's mode does not let it be read.

    Args:
        device: the index of a CUDA device; None stands for the current one.
    """
    if not settings.is_read():
        return None
    found = (file.find(name) for file in _files(device))
    return next((tree for tree in found if tree is not None), None)


def keep(device: int | None, name: str, tree: Any) -> None:
    """Writes an entry beside the user's store, if the store's mode lets it be written."""
    if settings.is_written():
        _files(device)[0].put(name, tree)


def _files(device: int | None) -> tuple[NormFile, ...]:
    layers = settings.layers(device)
    with LOCK:
        if layers not in _of_layers:
            user = NormFile(layers.user, not settings.is_written())
            shipped = (NormFile(store, read_only=True) for store in layers.shipped)
            _of_layers[layers] = (user, *shipped)
        return _of_layers[layers]


def _quoted(name: str) -> bytes:
    return json.dumps(name).encode()
