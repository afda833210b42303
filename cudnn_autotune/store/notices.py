"""What a user must hear of, and once only."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Hashable

import torch

from cudnn_autotune.store.process_lock import LOCK

_log = logging.getLogger("cudnn_autotune.store")
_said: set[Hashable] = set()
# A warning is of the line that called into this package, be it through a torch module.
_INSIDE = tuple(
    os.path.join(os.path.dirname(file), "") for file in (os.path.dirname(__file__), torch.__file__)
)


def warn_once(about: Hashable, message: str) -> None:
    """A UserWarning, and a line in the log at level INFO, the first time in this process that it
    is said.

    Args:
        about: what is the same whenever nothing new is to be said.
    """
    with LOCK:
        if about in _said:
            return
        _said.add(about)
    _log.info("%s", message)
    warnings.warn(message, UserWarning, stacklevel=_level_outside())


def _level_outside() -> int:
    """``stacklevel`` for the caller's own ``warnings.warn``."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level
