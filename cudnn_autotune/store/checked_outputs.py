"""The outputs that this user's processes have checked. Later processes need not check them.

There is a line for each engine of a problem whose output was right: a digest of the conditions of
the check, and the relative error. To withdraw it, its digest is overwritten. A line without a line
feed may be incomplete, and is not believed. The file lies in the private folder of compiled plans,
and is trusted as they are.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from cudnn_autotune.core import versions
from cudnn_autotune.core.fork_safe_lock import LOCK
from cudnn_autotune.store import settings
from cudnn_autotune.store.environment import default_folder
from cudnn_autotune.store.kept_plans import environment_of
from cudnn_autotune.store.private_folder import folder_beside

_NAME = "checked-outputs"
_MOST_BYTES = 4 << 20  # some 50,000 lines; then the older half goes
_DIGEST = re.compile("[0-9a-f]{64}")

_log = logging.getLogger(__name__)


def error_of(problem: str, engine: str, device: int) -> float | None:
    """Returns the relative error of an engine's output that a process has found right.

    Args:
        problem, engine: Their texts.
        device: The index of a CUDA device.

    Returns:
        None if the store's mode forbids to read it, or there is no such check with this GPU model,
        driver, cuDNN, torch and version of this package.
    """
    file = _file(device)
    return file.error_of(problem, engine) if file and settings.is_read() else None


def remember(problem: str, engine: str, device: int, error: float) -> None:
    """Records that an output was right. It does not raise, even if it cannot write."""
    file = _file(device)
    if file and settings.is_written():
        file.add(problem, engine, error)


def withdraw(problem: str, engine: str, device: int) -> None:
    """Records that an output was wrong, even if it was recorded as right. It does not raise.

    In this process the withdrawal holds at once. If the file cannot be changed now, it is changed
    at the next record or withdrawal.
    """
    file = _file(device)
    if file:
        file.withdraw(problem, engine, is_written=settings.is_written())


class CheckedOutputs:
    """The file of one store's private folder, for one environment.

    Args:
        place: The path of the store, a folder or a file.
        environment: The conditions of every check.
    """

    def __init__(self, place: Path, environment: Mapping[str, object]) -> None:
        self._folder = folder_beside(place)
        self._environment = dict(environment)
        self._errors: dict[str, float] | None = None
        self._to_withdraw: set[str] = set()

    def error_of(self, problem: str, engine: str) -> float | None:
        with LOCK:
            return self._known().get(self._digest(problem, engine))

    def add(self, problem: str, engine: str, error: float) -> None:
        """Records a right output; with an infinite error, as :meth:`withdraw`."""
        if error == math.inf:
            self.withdraw(problem, engine)
            return
        digest = self._digest(problem, engine)
        with LOCK:
            if digest in self._known():
                return
            self._known()[digest] = error
        try:
            self._write_withdrawals()
            size = self._folder.append(_NAME, f"{digest} {error:.6g}\n".encode())
            if size > _MOST_BYTES:
                self._folder.rewrite(_NAME, _trimmed)
        except OSError as failure:
            _log.info("%s: the check of %s is not kept: %s", problem, engine, failure)

    def withdraw(self, problem: str, engine: str, *, is_written: bool = True) -> None:
        """Withdraws the record of an output, of this process or another."""
        digest = self._digest(problem, engine)
        with LOCK:
            self._known().pop(digest, None)
            if not is_written:
                return
            self._to_withdraw.add(digest)
        try:
            self._write_withdrawals()
        except OSError as failure:
            _log.warning("%s: the check of %s is not withdrawn: %s", problem, engine, failure)

    def _write_withdrawals(self) -> None:
        with LOCK:
            digests = set(self._to_withdraw)
        if not digests:
            return
        try:
            self._folder.blot_lines(_NAME, [digest.encode() for digest in digests])
        except OSError:
            # Without the file all outputs are checked again, which takes time only.
            if not self._folder.remove(_NAME):
                raise
        with LOCK:
            self._to_withdraw -= digests

    def _known(self) -> dict[str, float]:
        if self._errors is None:
            self._errors = self._read()
        return self._errors

    def _read(self) -> dict[str, float]:
        try:
            content = self._folder.read(_NAME, 2 * _MOST_BYTES) or b""
        except OSError as failure:
            _log.info("outputs are checked again: %s", failure)
            return {}
        found: dict[str, float] = {}
        *lines, _ = content.decode("ascii", "replace").split("\n")
        for line in lines:
            digest, _, text = line.partition(" ")
            error = _number(text)
            if _DIGEST.fullmatch(digest) and error >= 0:
                found[digest] = error
        # An earlier version of this package withdrew a record by a line with an infinite error.
        return {digest: error for digest, error in found.items() if error < math.inf}

    def _digest(self, problem: str, engine: str) -> str:
        depends_on = {**self._environment, "problem": problem, "engine": engine}
        return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _trimmed(content: bytes) -> bytes:
    """Returns the newer half of the lines, unless another process has been faster."""
    if len(content) <= _MOST_BYTES:
        return content
    lines = content.splitlines(keepends=True)
    return b"".join(lines[len(lines) // 2 :])


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
