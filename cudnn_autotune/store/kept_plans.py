"""Compiled plans of this user on disk, a file for each; beside them compiled kernels, and the
undecided trials of ``online``.

A file's first line has all that its content depends on, as JSON, and the file's name is the digest
of that. The second line is the digest of the rest. The rest is cuDNN's serialized plan, a kernel's
cubin, or a trial's record as JSON.

The functions are called on any thread. C++ calls :func:`find` and :func:`keep`, for plans whose
engine cuDNN compiles at run time. None raises: content that cannot be read or written is not kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cudnn_autotune.core import versions
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.store import settings
from cudnn_autotune.store.environment import Environment, default_folder
from cudnn_autotune.store.private_folder import folder_beside

GpuKey = int | str
"""The index of a CUDA device, or the JSON description of a GPU that need not be here."""


class Kind(NamedTuple):
    """The kind of content of a file."""

    format: str
    suffix: str


PLAN = Kind("cudnn_autotune compiled plan", ".plan")
KERNEL = Kind("cudnn_autotune compiled kernel", ".cubin")
TRIAL = Kind("cudnn_autotune trial of online, version 1", ".trial")
MOST_BYTES = 256 << 20
"""Bytes of a user's plans on disk, about, at most; the least recently used ones go."""
_MOST_PLAN_BYTES = 16 << 20
# Bytes that a process writes between two looks at the folder's size.
_PORTION_BYTES = MOST_BYTES // 16

_log = logging.getLogger(__name__)
_lock = ForkSafeLock()
_counts: Counter[str] = Counter()


def find(problem: str, engine: str, gpu: GpuKey) -> bytes | None:
    """Returns the serialized plan of an engine config for a problem; None if none is kept.

    Args:
        problem, engine: Their texts.
    """
    data = _found(PLAN, problem, engine, gpu)
    if data:
        _count("read")
    return data


def keep(problem: str, engine: str, gpu: GpuKey, data: bytes) -> None:
    """Keeps a plan that was just compiled."""
    _count("compiled")
    _keep(PLAN, problem, engine, gpu, data)


def find_kernel(function: str, digest: str) -> bytes | None:
    """Returns the cubin of a kernel; None if none is kept.

    Its digest covers its conditions (``engines.compiled_kernels``): any GPU of its architecture,
    with any driver, finds it.
    """
    return _found(KERNEL, function, digest, None)


def keep_kernel(function: str, digest: str, cubin: bytes) -> None:
    """Keeps a kernel that was just compiled."""
    _keep(KERNEL, function, digest, None, cubin)


def find_trial(problem: str, limits: str, gpu: GpuKey) -> Any:
    """Returns the record of a problem's trial, as plain JSON; None if none is kept.

    Args:
        problem: Its text.
        limits: The limits of the trial, as a text.
    """
    found = _found(TRIAL, problem, _trial_with(limits), gpu)
    try:
        return json.loads(found) if found else None
    except (ValueError, RecursionError) as error:
        _log.warning("%s: its trial begins again: %s", problem, error)
        return None


def keep_trial(problem: str, limits: str, gpu: GpuKey, record: Any) -> None:
    """Replaces the record of a trial; None removes it."""
    data = None if record is None else json.dumps(record).encode()
    _keep(TRIAL, problem, _trial_with(limits), gpu, data)


def _trial_with(limits: str) -> str:
    """Returns the conditions of candidates and times beside the problem and cuDNN; PyTorch's own
    path is one of the candidates."""
    return f"online {limits} torch={torch.__version__}"


def _found(kind: Kind, problem: str, engine: str, gpu: GpuKey | None) -> bytes | None:
    try:
        files = files_for(gpu, kind)
        return (files.find(problem, engine) if files else None) or None
    except Exception:
        _log.warning("%s of %s: what is kept cannot be read", engine, problem, exc_info=True)
        return None


def _keep(kind: Kind, problem: str, engine: str, gpu: GpuKey | None, data: bytes | None) -> None:
    """Replaces the data of a file; None removes it."""
    try:
        files = files_for(gpu, kind)
        if files and data is None:
            files.remove(problem, engine)
        elif files and data is not None:
            files.keep(problem, engine, data)
    except Exception:
        _log.warning("%s of %s is not kept", engine, problem, exc_info=True)


def counts() -> dict[str, int]:
    """Returns the numbers of plans that this process has ``read`` back and ``compiled``."""
    with _lock:
        return {"read": _counts["read"], "compiled": _counts["compiled"]}


def _count(what: str) -> None:
    with _lock:
        _counts[what] += 1


def files_for(gpu: GpuKey | None, kind: Kind = PLAN) -> PlanFiles | None:
    """Returns the files for a GPU, or for content that depends on none, under the present settings;
    None if no file is kept."""
    chosen = settings.get_store_settings()
    if chosen.mode == "off":
        return None
    place = chosen.path or default_folder()
    return _files(place, settings.is_read(), settings.is_written(), gpu, kind)


@functools.lru_cache(maxsize=64)
def _files(
    place: Path, is_read: bool, is_written: bool, gpu: GpuKey | None, kind: Kind
) -> PlanFiles | None:
    environment = {} if gpu is None else environment_of(gpu)
    if environment is None:
        return None
    return PlanFiles(place, environment, is_read=is_read, is_written=is_written, kind=kind)


def environment_of(gpu: GpuKey) -> dict[str, object] | None:
    """Returns the conditions of every compiled plan for a GPU, as plain JSON; None if the driver's
    version is unknown."""
    found = versions.environment(None if isinstance(gpu, str) else gpu)
    here = Environment.from_versions(found).to_json()
    if isinstance(gpu, str):
        return {**here, "cuda": torch.version.cuda, "gpu": gpu}
    if found["driver"] is None:
        return None
    return {**here, "cuda": torch.version.cuda, "driver": found["driver"]}


class PlanFiles:
    """The plans for one GPU, driver and cuDNN in a store's private folder.

    A plan that cannot be written is not kept. A plan that cannot be read, is damaged or was written
    by another user is not found. Neither raises.

    Args:
        place: The path of the store, a folder or a file.
        environment: The conditions of every plan.
        is_read, is_written: Whether plans are read and written.
        kind: The kind of content, if not plans.
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
        """Keeps a serialized plan, instead of an earlier one."""
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
        """Returns the first line of a plan's file."""
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
