"""The outputs that this user's processes have checked, so that later ones need not check them.

A line for each engine of a problem whose output was right: the digest of what that depends on, and
the relative error. A later line with an infinite error withdraws it. The file lies in the private
folder of compiled plans, and is believed as they are.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from cudnn_autotune.core import versions
from cudnn_autotune.store import settings
from cudnn_autotune.store.folder import default_folder
from cudnn_autotune.store.kept_plans import environment_of
from cudnn_autotune.store.plan_files import folder_beside
from cudnn_autotune.store.process_lock import LOCK

_NAME = "checked-outputs"
_MOST_BYTES = 4 << 20  # some 50,000 lines; then the older half goes
_DIGITS = 64

_log = logging.getLogger(__name__)


def error_of(problem: str, engine: str, device: int) -> float | None:
    """Returns the relative error of an engine's output that a process has found right.

    Args:
        problem, engine: Their texts.
        device: The index of a CUDA device.

    Returns:
        None if no process of this user has, with this GPU model, driver, cuDNN, torch and version
        of this package, or if the store's mode does not let it be read.
    """
    file = _file(device)
    return file.error_of(problem, engine) if file and settings.is_read() else None


def remember(problem: str, engine: str, device: int, error: float) -> None:
    """Records that an output was right. It does not raise, and may not be able to write it."""
    file = _file(device)
    if file and settings.is_written():
        file.add(problem, engine, error)


def withdraw(problem: str, engine: str, device: int) -> None:
    """Records that an output was wrong, whatever was recorded before; as :func:`remember`."""
    remember(problem, engine, device, math.inf)


class CheckedOutputs:
    """The file of one store's private folder, for one environment.

    Args:
        place: The path of the store, a folder or a file.
        environment: What every check depends on.
    """

    def __init__(self, place: Path, environment: Mapping[str, object]) -> None:
        self._folder = folder_beside(place)
        self._environment = dict(environment)
        self._errors: dict[str, float] | None = None

    def error_of(self, problem: str, engine: str) -> float | None:
        with LOCK:
            if self._errors is None:
                self._errors = self._read()
            return self._errors.get(self._digest(problem, engine))

    def add(self, problem: str, engine: str, error: float) -> None:
        is_right = error < math.inf
        if (self.error_of(problem, engine) is not None) is is_right:
            return
        digest = self._digest(problem, engine)
        with LOCK:
            assert self._errors is not None
            _enter(self._errors, digest, error)
        try:
            size = self._folder.append(_NAME, f"{digest} {error:.6g}\n".encode())
            if size > _MOST_BYTES:
                lines = (self._folder.read(_NAME, 2 * _MOST_BYTES) or b"").splitlines(keepends=True)
                self._folder.write(_NAME, b"".join(lines[len(lines) // 2 :]))
        except OSError as failure:
            _log.info("%s: the check of %s is not kept: %s", problem, engine, failure)

    def _read(self) -> dict[str, float]:
        try:
            content = self._folder.read(_NAME, 2 * _MOST_BYTES) or b""
        except OSError as failure:
            _log.info("outputs are checked again: %s", failure)
            return {}
        found: dict[str, float] = {}
        for line in content.decode("ascii", "replace").splitlines():
            digest, _, text = line.partition(" ")
            error = _number(text)
            if len(digest) == _DIGITS and error >= 0:
                _enter(found, digest, error)
        return found

    def _digest(self, problem: str, engine: str) -> str:
        depends_on = {**self._environment, "problem": problem, "engine": engine}
        return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _enter(errors: dict[str, float], digest: str, error: float) -> None:
    if error < math.inf:
        errors[digest] = error
    else:
        errors.pop(digest, None)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _file(device: int) -> CheckedOutputs | None:
    place = settings.get_store_settings().path or default_folder()
    return _file_at(place, device)


@functools.lru_cache(maxsize=64)
def _file_at(place: Path, device: int) -> CheckedOutputs | None:
    environment = environment_of(device)
    if environment is None:
        return None
    more = {"torch": torch.__version__, "cudnn_autotune": versions.version()}
    return CheckedOutputs(place, {**environment, **more})
