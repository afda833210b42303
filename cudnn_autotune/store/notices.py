"""Warnings that a process gives only once."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Hashable
from contextlib import suppress
from types import FrameType

import torch

from cudnn_autotune.core.fork_safe_lock import LOCK

_log = logging.getLogger("cudnn_autotune.store")
_given: set[Hashable] = set()
# A warning names the line of the user's code that called this package, also through torch.
_INSIDE = tuple(
    os.path.join(os.path.dirname(file), "") for file in (os.path.dirname(__file__), torch.__file__)
)


class _Thread(threading.local):
    waiting: list[str] | None = None


_thread = _Thread()


def warn_once(about: Hashable, message: str) -> None:
    """Gives a UserWarning, and logs it at level INFO, once in a process for each ``about``."""
    with LOCK:
        if about in _given:
            return
        _given.add(about)
    _log.info("%s", message)
    if _thread.waiting is None:
        warnings.warn(message, UserWarning, stacklevel=_level_outside())
    else:
        _thread.waiting.append(message)


class WarningsPutOff:
    """A context that gives its warnings at its end.

    A program may turn warnings into errors. At the end these leave no change half done. If the
    block itself raises, its error is raised.
    """

    def __enter__(self) -> None:
        self._is_outer = _thread.waiting is None
        if self._is_outer:
            _thread.waiting = []

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not self._is_outer:
            return
        waiting, _thread.waiting = _thread.waiting or [], None
        with suppress(*[] if error is None else [UserWarning]):
            for message in waiting:
                warnings.warn(message, UserWarning, stacklevel=_level_outside())


def _level_outside() -> int:
    """Returns the ``stacklevel`` with which the caller's ``warnings.warn`` names user code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
        while _imports(frame) and frame.f_back is not None:
            frame = frame.f_back
        level += 1
    return level


def _imports(frame: FrameType) -> bool:
    """Returns whether a frame is of Python's import, which ``warnings.warn`` does not count."""
    return "importlib" in frame.f_code.co_filename and "_bootstrap" in frame.f_code.co_filename
