"""The compiled plans and kernels of this process, and the trials of ``online`` that it could not
decide, in the user's private folder.

The functions are called on any thread; :func:`find` and :func:`keep` by C++, for plans whose engine
cuDNN compiles at run time. None raises: what cannot be read or written is not kept.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from cudnn_autotune.core import versions
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.store import settings
from cudnn_autotune.store.environment import Environment, default_folder
from cudnn_autotune.store.plan_files import KERNEL, PLAN, TRIAL, Kind, PlanFiles

Gpu = int | str
"""The index of a CUDA device, or the JSON description of a GPU that need not be here."""

_log = logging.getLogger(__name__)
_lock = ForkSafeLock()
_counts: Counter[str] = Counter()


def find(problem: str, engine: str, gpu: Gpu) -> bytes | None:
    """Returns the serialized plan of an engine config for a problem; None if none is kept.

    Args:
        problem, engine: Their texts.
    """
    try:
        files = files_for(gpu)
        data = files and files.find(problem, engine)
    except Exception:
        _log.warning("%s of %s is compiled", engine, problem, exc_info=True)
        return None
    if data:
        _count("read")
    return data or None


def keep(problem: str, engine: str, gpu: Gpu, data: bytes) -> None:
    """Keeps a plan that was just compiled."""
    _count("compiled")
    try:
        files = files_for(gpu)
        if files:
            files.keep(problem, engine, data)
    except Exception:
        _log.warning("%s of %s is not kept", engine, problem, exc_info=True)


def find_kernel(function: str, digest: str) -> bytes | None:
    """Returns the cubin of a kernel; None if none is kept.

    Its digest says what it depends on (``engines.compiled_kernels``), so that any GPU of its
    architecture, with any driver, finds it.
    """
    try:
        files = files_for(None, KERNEL)
        return files.find(function, digest) if files else None
    except Exception:
        _log.warning("the kernel %s is compiled", function, exc_info=True)
        return None


def keep_kernel(function: str, digest: str, cubin: bytes) -> None:
    """Keeps a kernel that was just compiled."""
    try:
        if files := files_for(None, KERNEL):
            files.keep(function, digest, cubin)
    except Exception:
        _log.warning("the kernel %s is not kept", function, exc_info=True)


def find_trial(problem: str, limits: str, gpu: Gpu) -> Any:
    """Returns the record of a problem's trial, as plain JSON; None if none is kept.

    Args:
        problem: Its text.
        limits: What the trial was held to, as a text.
    """
    try:
        files = files_for(gpu, TRIAL)
        found = files and files.find(problem, _trial_with(limits))
        return json.loads(found) if found else None
    except Exception:
        _log.warning("%s: its trial begins anew", problem, exc_info=True)
        return None


def keep_trial(problem: str, limits: str, gpu: Gpu, record: Any) -> None:
    """Keeps a record in the place of an earlier one; None removes that."""
    try:
        files = files_for(gpu, TRIAL)
        if files and record is None:
            files.remove(problem, _trial_with(limits))
        elif files:
            files.keep(problem, _trial_with(limits), json.dumps(record).encode())
    except Exception:
        _log.warning("%s: its trial is not kept", problem, exc_info=True)


def _trial_with(limits: str) -> str:
    """Returns the terms beside the problem and cuDNN on which the candidates and their times
    depend: PyTorch's own path is one of them."""
    return f"online {limits} torch={torch.__version__}"


def counts() -> dict[str, int]:
    """Returns how many plans this process has ``read`` back, and how many it has ``compiled``."""
    with _lock:
        return {"read": _counts["read"], "compiled": _counts["compiled"]}


def _count(what: str) -> None:
    with _lock:
        _counts[what] += 1


def files_for(gpu: Gpu | None, kind: Kind = PLAN) -> PlanFiles | None:
    """Returns the files for a GPU, or for what depends on none, under the present settings; None if
    nothing is kept."""
    chosen = settings.get_store_settings()
    if chosen.mode == "off":
        return None
    place = chosen.path or default_folder()
    return _files(place, settings.is_read(), settings.is_written(), gpu, kind)


@functools.lru_cache(maxsize=64)
def _files(
    place: Path, is_read: bool, is_written: bool, gpu: Gpu | None, kind: Kind
) -> PlanFiles | None:
    environment = {} if gpu is None else environment_of(gpu)
    if environment is None:
        return None
    return PlanFiles(place, environment, is_read=is_read, is_written=is_written, kind=kind)


def environment_of(gpu: Gpu) -> dict[str, object] | None:
    """Returns what every compiled plan for a GPU depends on, as plain JSON; None if the driver's
    version is unknown."""
    found = versions.environment(None if isinstance(gpu, str) else gpu)
    here = Environment.from_versions(found).to_json()
    if isinstance(gpu, str):
        return {**here, "cuda": torch.version.cuda, "gpu": gpu}
    if found["driver"] is None:
        return None
    return {**here, "cuda": torch.version.cuda, "driver": found["driver"]}
