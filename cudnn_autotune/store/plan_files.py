"""Compiled plans on disk, a file for each plan, and compiled kernels and undecided trials of
``online`` beside them.

A file is named by the digest of what its plan depends on. Its first line says that in full, as
JSON, its second line is the digest of the rest, and the rest is cuDNN's serialized plan, a kernel's
cubin, or a trial's record as JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cudnn_autotune.store.environment import names_file
from cudnn_autotune.store.private_folder import PrivateFolder


class Kind(NamedTuple):
    """The kind of content of a file."""

    format: str
    suffix: str


PLAN = Kind("cudnn_autotune compiled plan", ".plan")
KERNEL = Kind("cudnn_autotune compiled kernel", ".cubin")
TRIAL = Kind("cudnn_autotune trial of online, version 1", ".trial")
MOST_BYTES = 256 << 20
"""About the most that a user's plans take on disk; those that were not used for longest go."""
_MOST_PLAN_BYTES = 16 << 20
# A process looks at the folder's size each time it has written so much.
_PORTION_BYTES = MOST_BYTES // 16

_log = logging.getLogger(__name__)


def folder_beside(place: Path) -> PrivateFolder:
    """Returns the folder of this user's plans for a store, which is a folder or a file."""
    if names_file(place):
        return PrivateFolder(place.parent, f"{place.stem}.plans")
    return PrivateFolder(place, "plans")


class PlanFiles:
    """The plans for one GPU, driver and cuDNN in a store's private folder.

    A plan that cannot be written is not kept, and one that cannot be read, is damaged or was
    written by another user is not found. Neither raises.

    Args:
        place: The path of the store, a folder or a file.
        environment: What every plan depends on.
        is_read, is_written: Whether plans are read, and written.
        kind: What is kept instead of plans.
    """

    def __init__(
        self,
        place: Path,
        environment: Mapping[str, object],
        *,
        is_read: bool,
        is_written: bool,
        kind: Kind = PLAN,
    ) -> None:
        self.folder = folder_beside(place)
        self._environment = dict(environment)
        self._is_read = is_read
        self._is_written = is_written
        self._kind = kind
        self._unchecked_bytes = _PORTION_BYTES  # the first write looks at the folder's size

    def find(self, problem: str, engine: str) -> bytes | None:
        """Returns the serialized plan of an engine config for a problem, or None."""
        if not self._is_read:
            return None
        title = self._title(problem, engine)
        name = self._name(title)
        try:
            content = self.folder.read(name, _MOST_PLAN_BYTES)
            if content is None:
                return None
            data = _checked(content, title)
        except (OSError, ValueError) as error:
            _log.info("%s of %s: what is kept is not used: %s", engine, problem, error)
            return None
        if self._is_written:
            self.folder.mark_used(name)
        return data

    def keep(self, problem: str, engine: str, data: bytes) -> None:
        """Keeps a serialized plan, in the place of an earlier one."""
        title = self._title(problem, engine)
        content = b"\n".join((title, _digest(data).encode(), data))
        if not self._is_written or len(content) > _MOST_PLAN_BYTES:
            return
        try:
            self.folder.write(self._name(title), content)
        except OSError as error:
            _log.info("%s of %s is not kept: %s", engine, problem, error)
            return
        self._unchecked_bytes += len(content)
        if self._unchecked_bytes > _PORTION_BYTES:
            self._unchecked_bytes = 0
            self.folder.trim(MOST_BYTES - _PORTION_BYTES)

    def remove(self, problem: str, engine: str) -> None:
        """Removes the plan of an engine config for a problem, if there is one."""
        if self._is_written:
            self.folder.remove(self._name(self._title(problem, engine)))

    def _title(self, problem: str, engine: str) -> bytes:
        """The first line of a plan's file."""
        depends_on = {**self._environment, "problem": problem, "engine": engine}
        return json.dumps({"format": self._kind.format, **depends_on}, sort_keys=True).encode()

    def _name(self, title: bytes) -> str:
        return _digest(title) + self._kind.suffix


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checked(content: bytes, title: bytes) -> bytes:
    """Returns the plan in a file; raises ValueError unless it is whole and has this title."""
    found, _, rest = content.partition(b"\n")
    digest, _, data = rest.partition(b"\n")
    if found != title:
        raise ValueError("its file is of another GPU, version, problem or engine")
    if digest != _digest(data).encode():
        raise ValueError("its file is damaged")
    return data
